"""What people do by hand: load all ranks, join, cast, save, check for NaN and Inf, hash. The baseline to beat.

python benchmarks/naive_merge.py CHECKPOINT OUT
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.tensor  # so that torch.load knows DTensor
from safetensors.torch import save_file


def main(checkpoint: Path, out: Path) -> None:
    """Merge the rank files of ``checkpoint`` into ``out/model.safetensors``, flushed to the disk."""
    warnings.simplefilter("ignore")
    out.mkdir(parents=True, exist_ok=True)
    paths = sorted(checkpoint.glob("model_world_size_*_rank_*.pt"), key=lambda p: int(p.stem.rsplit("_", 1)[1]))
    ranks = [torch.load(path, weights_only=True) for path in paths]
    merged = {}
    for fqn, first in ranks[0].items():
        shards = [rank[fqn].to_local() for rank in ranks]
        merged[fqn] = torch.cat(shards, first.placements[0].dim).to(torch.bfloat16)
    save_file(merged, out / "model.safetensors", metadata={"format": "pt"})
    for fqn, tensor in merged.items():
        if not torch.isfinite(tensor).all():
            raise SystemExit(f"{fqn} holds NaN or Inf")
    with open(out / "model.safetensors", "rb") as file:
        print(hashlib.file_digest(file, "sha256").hexdigest())
        os.fsync(file.fileno())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
