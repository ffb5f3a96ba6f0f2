"""What people do by hand to trust a merge: load all ranks and the model, join, cast, compare. The baseline to beat.

python benchmarks/naive_verify.py CHECKPOINT MODEL
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.tensor  # so that torch.load knows DTensor
from safetensors.torch import load_file


def main(checkpoint: Path, model: Path) -> None:
    """Compare the rank files of ``checkpoint`` with ``model/model.safetensors``, tensor by tensor."""
    warnings.simplefilter("ignore")
    paths = sorted(checkpoint.glob("model_world_size_*_rank_*.pt"), key=lambda p: int(p.stem.rsplit("_", 1)[1]))
    ranks = [torch.load(path, weights_only=True) for path in paths]
    found = load_file(model / "model.safetensors")
    for fqn, first in ranks[0].items():
        shards = [rank[fqn].to_local() for rank in ranks]
        if not torch.equal(torch.cat(shards, first.placements[0].dim).to(torch.bfloat16), found[fqn]):
            raise SystemExit(f"{fqn} differs")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
