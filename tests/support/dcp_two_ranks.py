"""Saves sharded tensors with DCP as one of two gloo ranks: ``python dcp_two_ranks.py RANK STORE_FILE OUT_DIR``."""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

# The last has one row: the second rank writes an entry without elements, at the end of its file.
SHAPES = {
    "model.embed_tokens.weight": (7, 4),
    "model.norm.weight": (3,),
    "lm_head.weight": (4, 6),
    "score.weight": (1, 4),
}


def values(name: str) -> torch.Tensor:
    """The tensor of that name; both ranks and the test make the same one."""
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(SHAPES[name], generator=generator)


def main(rank: int, store: str, out: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    dims = {"lm_head.weight": 1}
    model = {name: distribute_tensor(values(name), mesh, [Shard(dims.get(name, 0))]) for name in SHAPES}
    moments = {f"state.{name}.exp_avg": tensor * 2 for name, tensor in model.items()}
    dcp.save({"optim": moments, "model": model}, checkpoint_id=out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
