"""Writes FSDP rank files of any world size in one process: torch's own classes over a fake process group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

logging.getLogger("torch.distributed").setLevel(logging.ERROR)


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a process group whose other ranks don't exist."""
    # Specs that torch cached for another rank carry that rank's coordinate.
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank_name(world_size: int, rank: int) -> str:
    """verl's file name."""
    return f"model_world_size_{world_size}_rank_{rank}.pt"


def save_ranks(
    directory: Path, world_size: int, state_of: Callable[[int], Mapping[str, Any]], *, named: bool = True
) -> Path:
    """Save what ``state_of(rank)`` gives, called inside that rank's process group.

    torch writes the file's name into it, but not into a stream: ``named=False``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for rank in range(world_size):
        path = directory / rank_name(world_size, rank)
        with as_rank(rank, world_size):
            if named:
                torch.save(dict(state_of(rank)), path)
                continue
            with open(path, "wb") as stream:
                torch.save(dict(state_of(rank)), stream)
    return directory


def mesh_of(shape: Sequence[int], names: Sequence[str] | None = None) -> DeviceMesh:
    """A CPU mesh over all ranks, in rank order."""
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=None if names is None else tuple(names))


def sharded(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """This rank's part of ``full``, cut by torch's own placements from the first mesh dim to the last."""
    local = full
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        local = full.new_empty(0)
    else:
        for mesh_dim, placement in enumerate(placements):
            if not isinstance(placement, Replicate):
                parts, _ = placement._split_tensor(local, mesh.size(mesh_dim), with_padding=False)
                local = parts[coordinate[mesh_dim]]
    return from_local(local.clone(), full, mesh, placements)


def from_local(local: torch.Tensor, full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """A DTensor with these local values, whatever they are, and the shape of ``full``."""
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def sharded_pair(directory: Path, **changes: Any) -> Path:
    """Two ranks; rank 1 differs by ``changes``."""

    def state(rank: int) -> dict[str, Any]:
        facts: dict[str, Any] = {"shape": (4, 2), "dtype": torch.float32, "mesh": (2,), "placements": [Shard(0)]}
        if rank == 1:
            facts |= changes
        full = torch.zeros(facts["shape"], dtype=facts["dtype"])
        state = {"w": sharded(full, mesh_of(facts["mesh"]), facts["placements"])}
        return {**state, **facts.get("more", {})}

    return save_ranks(directory, 2, state)
