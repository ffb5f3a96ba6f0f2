"""FSDP rank files, put together by cutting index tensors with ``torch.chunk`` as the trainer's library cut the weights.

Each rank's part of each dim is a list of global indices: start with all of them and chunk once per mesh dim that
shards it, in the order in which torch sharded. That says where every local row belongs, for any mixture of FSDP,
HSDP and tensor parallelism, uneven and empty shards included, without a formula for offsets.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptflow.errors import InconsistentCheckpointError, UnsupportedCheckpointError
from ckptflow.tensors import Shape
from ckptflow.validate.reread.base import by_plain_name
from ckptflow.validate.reread.torch_stubs import Inert, load_rank_file, parts_of

if TYPE_CHECKING:
    import torch

RANK_FILE = re.compile(r"_world_size_(\d+)_rank_(\d+)\.pt$")


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A rank's part of a tensor and the global indices of its rows in every dim."""

    file: Path
    local: torch.Tensor
    indices: tuple[torch.Tensor, ...]


class FsdpRereader:
    """State dicts of all ranks, loaded by torch with mapped storages."""

    how = "torch.load of every rank file, placed by torch.chunk of the indices"

    def __init__(self, files: Sequence[Path]) -> None:
        self._ranks: dict[int, tuple[Path, dict[str, Any]]] = {}
        for path in files:
            match = RANK_FILE.search(path.name)
            if match is None:
                raise RuntimeError(f"{path.name} does not name its rank")
            self._ranks[int(match.group(2))] = (path, load_rank_file(path))
        names = [name for _, state in self._ranks.values() for name in state]
        self._look_up = by_plain_name(list(dict.fromkeys(names)))
        self._shards = lru_cache(maxsize=4)(self._find_shards)

    def shape(self, fqn: str) -> Shape | None:
        name = self._look_up(fqn)
        value = None if name is None else next((s[name] for _, s in self._ranks.values() if name in s), None)
        return None if value is None or not hasattr(value, "shape") else tuple(value.shape)

    def read(self, fqn: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        import torch

        shards = self._shards(fqn)
        box = torch.empty(sizes, dtype=shards[0].local.dtype)
        filled = torch.zeros(sizes, dtype=torch.bool)
        for shard in shards:
            rows = [
                ((index >= low) & (index < low + size)).nonzero().flatten()
                for index, low, size in zip(shard.indices, offsets, sizes, strict=True)
            ]
            if any(len(row) == 0 for row in rows):
                continue
            places = [shard.indices[d][row] - offsets[d] for d, row in enumerate(rows)]
            box[_grid(places)] = shard.local[_grid(rows)]
            filled[_grid(places)] = True
        if not bool(filled.all()):
            raise InconsistentCheckpointError(
                "the shards of a tensor leave a gap",
                tensor=fqn,
                expected=f"{prod(sizes)} elements at {list(offsets)}",
                found=f"{int(filled.sum())} elements",
            )
        return box

    def _find_shards(self, fqn: str) -> list[LocalShard]:
        name = self._look_up(fqn)
        found: list[LocalShard] = []
        for rank, (path, state) in sorted(self._ranks.items()):
            if name is None or name not in state:
                continue
            value = state[name]
            parts = parts_of(value)
            if parts is None:
                return [LocalShard(path, value.detach(), _all_indices(value.shape))]  # whole in every rank
            if isinstance(parts, dict):
                found.append(_dtensor_shard(fqn, path, rank, tuple(value.shape), parts))
            else:
                found += _sharded_tensor_shards(path, parts)
        return [s for s in found if s.local.numel()] or found[:1]


def _grid(rows: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Index of the rows of each dim, crossed; runs of neighbours become slices, which copy faster."""
    import torch

    runs = [slice(int(r[0]), int(r[-1]) + 1) if int(r[-1]) - int(r[0]) + 1 == len(r) else None for r in rows]
    if all(run is not None for run in runs):
        return tuple(runs)
    return torch.meshgrid(*rows, indexing="ij")


def _all_indices(shape: Sequence[int]) -> tuple[torch.Tensor, ...]:
    import torch

    return tuple(torch.arange(n) for n in shape)


def _dtensor_shard(fqn: str, path: Path, rank: int, shape: Shape, parts: dict[str, Any]) -> LocalShard:
    import torch

    spec = parts["_spec"].state
    sizes, coordinate = _mesh_place(spec["mesh"].state, rank, path)
    indices = list(_all_indices(shape))
    splits = [_split(fqn, path, mesh_dim, placement) for mesh_dim, placement in enumerate(spec["placements"])]
    # Left to right, but a strided shard was cut after those on its right: the larger its factor, the later.
    done = [1] * len(shape)
    for factor, mesh_dim, dim in sorted(split for split in splits if split is not None):
        if factor > 1 and factor != done[dim]:
            raise UnsupportedCheckpointError(
                "a strided shard does not fit its mesh", file=path, tensor=fqn, expected=done[dim], found=factor
            )
        chunks = torch.chunk(indices[dim], sizes[mesh_dim])
        at = coordinate[mesh_dim]
        indices[dim] = chunks[at] if at < len(chunks) else indices[dim][:0]
        done[dim] *= sizes[mesh_dim]
    local = parts["_local_tensor"].detach()
    wanted = tuple(len(index) for index in indices)
    if prod(wanted) != local.numel() or (local.numel() and tuple(local.shape) != wanted):
        raise InconsistentCheckpointError(
            "a rank's part of a tensor has another shape than its placements say",
            file=path,
            tensor=fqn,
            expected=list(wanted),
            found=list(local.shape),
        )
    return LocalShard(path, local, tuple(indices))


def _split(fqn: str, path: Path, mesh_dim: int, placement: Inert) -> tuple[int, int, int] | None:
    """(split factor, mesh dim, tensor dim) of a shard; None for a replica."""
    kind = getattr(placement, "kind", type(placement).__name__)
    if kind == "Replicate":
        return None
    if kind not in ("Shard", "_StridedShard"):
        raise UnsupportedCheckpointError("partial sums can't be put together", file=path, tensor=fqn, found=kind)
    values = {**dict(zip(("dim", "split_factor"), placement.arguments, strict=False)), **placement.state}
    return int(values.get("split_factor", 1)), mesh_dim, int(values["dim"])


def _mesh_place(mesh: dict[str, Any], rank: int, path: Path) -> tuple[list[int], list[int]]:
    """Sizes of the mesh dims, and the rank's coordinate on each.

    Raises:
        InconsistentCheckpointError: the mesh was saved by another rank than the file's name says.
    """
    tensor = mesh.get("mesh")
    if tensor is not None:
        sizes = list(tensor.shape)
        places = (tensor == rank).nonzero()
        coordinate = [int(i) for i in places[0]] if len(places) else []
    else:
        position = mesh["_rank_map"].tolist().index(rank)
        axes = [(axis.state["shape"], axis.state["stride"]) for axis in _axes(mesh["_layout"])]
        sizes = [prod(_flat(shape)) for shape, _ in axes]
        coordinate = [_along(position, _flat(shape), _flat(stride)) for shape, stride in axes]
    saved = mesh.get("_coordinate_on_dim")
    if saved is not None and list(saved) != coordinate:
        raise InconsistentCheckpointError(
            "a rank file was saved by another rank than its name says",
            file=path,
            expected=f"mesh coordinate {coordinate} for rank {rank}",
            found=f"mesh coordinate {list(saved)}",
            fix="the files were renamed or swapped; copy the checkpoint again",
        )
    return sizes, coordinate


def _axes(layout: Inert) -> Sequence[Inert]:
    axes = layout.state.get("axes")
    if axes is None:
        raise pickle.UnpicklingError("a device mesh layout of an unknown torch release")
    return list(axes)


def _flat(value: Any) -> list[int]:
    return [n for item in value for n in _flat(item)] if isinstance(value, (tuple, list)) else [int(value)]


def _along(position: int, sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Coordinate on an axis, which may be several root axes flattened into one."""
    coordinate = 0
    for size, stride in zip(sizes, strides, strict=True):
        coordinate = coordinate * size + position // stride % size
    return coordinate


def _sharded_tensor_shards(path: Path, parts: Sequence[Any]) -> list[LocalShard]:
    import torch

    shards = []
    for shard in parts[0]:
        metadata = shard.state["metadata"].state
        indices = tuple(
            torch.arange(offset, offset + size)
            for offset, size in zip(metadata["shard_offsets"], metadata["shard_sizes"], strict=True)
        )
        shards.append(LocalShard(path, shard.state["tensor"].detach(), indices))
    return shards
