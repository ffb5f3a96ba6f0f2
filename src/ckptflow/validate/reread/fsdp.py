"""FSDP rank files, put together by cutting index tensors with ``torch.chunk`` as the trainer's library cut the weights.

Each rank's part of each dim is a list of global indices: start with all of them and chunk once per mesh dim that
shards it, in the order in which torch sharded. That says where every local row belongs, for any mixture of FSDP,
HSDP and tensor parallelism, uneven and empty shards included, without a formula for offsets.
"""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckptflow.errors import InconsistentCheckpointError, UnsupportedCheckpointError
from ckptflow.processes.collector import without_gc
from ckptflow.tensors import Shape
from ckptflow.validate.reread.base import by_plain_name
from ckptflow.validate.reread.torch_stubs import Inert, load_rank_file, parts_of, trained_values

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
RANK_FILE = re.compile(r"_world_size_(\d+)_rank_(\d+)\.pt$")


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A rank's part of a tensor and the global indices of its rows in every dim, a range where they are neighbours."""

    file: Path
    local: torch.Tensor
    indices: tuple[range | torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """How a rank's part was cut out of a DTensor.

    Attributes:
        shape: of the whole.
        mesh: sizes of the mesh dims.
        coordinate: of the rank, on each mesh dim.
        splits: split factor, mesh dim and tensor dim of each shard.
    """

    shape: Shape
    mesh: Shape
    coordinate: Shape
    splits: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Region:
    """The box that a shard of a ShardedTensor is."""

    offsets: Shape
    sizes: Shape


Parts = tuple[Shape, tuple[tuple["torch.Tensor", Cut | Region | None], ...]]
"""Shape of the whole, and a rank's own values with their place: None for a tensor that every rank holds whole."""


class FsdpRereader:
    """State dicts of all ranks, loaded by torch with mapped storages.

    Raises:
        InconsistentCheckpointError: a file was saved by another rank than its name says.
        UnsupportedCheckpointError: partial sums.
    """

    how = "torch.load of every rank file, placed by torch.chunk of the indices"

    def __init__(self, files: Sequence[Path]) -> None:
        self._ranks: dict[int, tuple[Path, dict[str, Parts]]] = {}
        same: dict[object, Any] = {}
        for path in files:
            match = RANK_FILE.search(path.name)
            if match is None:
                raise RuntimeError(f"{path.name} does not name its rank")
            rank = int(match.group(2))
            with without_gc():
                self._ranks[rank] = path, _RankFile(path, rank, same).parts()
        names = [name for _, state in self._ranks.values() for name in state]
        self._look_up = by_plain_name(list(dict.fromkeys(names)))
        self._shards = lru_cache(maxsize=4)(self._find_shards)

    def shape(self, fqn: str) -> Shape | None:
        name = self._look_up(fqn)
        return None if name is None else next((s[name][0] for _, s in self._ranks.values() if name in s), None)

    def read(self, fqn: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        import torch

        box: torch.Tensor | None = None
        filled: torch.Tensor | None = None
        for shard in self._shards(fqn):
            met = [_meeting(*dim) for dim in zip(shard.indices, offsets, sizes, strict=True)]
            if any(not _count(rows) for rows, _ in met):
                continue
            values = shard.local[_grid([rows for rows, _ in met])]
            if tuple(values.shape) == sizes and all(isinstance(places, slice) for _, places in met):
                return values
            if box is None or filled is None:
                box, filled = torch.empty(sizes, dtype=values.dtype), torch.zeros(sizes, dtype=torch.bool)
            places = _grid([places for _, places in met])
            box[places], filled[places] = values, True
        if box is None or filled is None or not bool(filled.all()):
            raise InconsistentCheckpointError(
                "the shards of a tensor leave a gap",
                tensor=fqn,
                expected=f"{prod(sizes)} elements at {list(offsets)}",
                found=f"{0 if filled is None else int(filled.sum())} elements",
            )
        return box

    def _find_shards(self, fqn: str) -> list[LocalShard]:
        name = self._look_up(fqn)
        found: list[LocalShard] = []
        for _, (path, state) in sorted(self._ranks.items()):
            if name is None or name not in state:
                continue
            for local, place in state[name][1]:
                if place is None:
                    return [LocalShard(path, local, _all_indices(local.shape))]
                found.append(_placed(fqn, path, local, place))
        return [s for s in found if s.local.numel()] or found[:1]


class _RankFile:
    """Takes a rank's state dict to what is needed of it: there are as many parts as tensors times ranks."""

    def __init__(self, path: Path, rank: int, same: dict[object, Any]) -> None:
        self._path, self._rank, self._same = path, rank, same
        self._meshes: dict[int, tuple[Shape, Shape]] = {}

    def parts(self) -> dict[str, Parts]:
        state = load_rank_file(self._path)
        return {sys.intern(name): self._parts(name, value) for name, value in state.items() if hasattr(value, "shape")}

    def _parts(self, name: str, value: torch.Tensor) -> Parts:
        shape, parts = self._one(tuple(value.shape)), parts_of(value)
        if parts is None:
            return shape, ((value.detach(), None),)
        if isinstance(parts, dict):
            local = trained_values(parts["_local_tensor"]).detach()
            return shape, ((local, self._cut(name, shape, parts["_spec"].state)),)
        return shape, tuple((s.state["tensor"].detach(), self._region(s.state["metadata"].state)) for s in parts[0])

    def _cut(self, name: str, shape: Shape, spec: Mapping[str, Any]) -> Cut:
        mesh = spec["mesh"]
        if id(mesh) not in self._meshes:  # the tensors of one file share its few meshes
            self._meshes[id(mesh)] = _mesh_place(mesh.state, self._rank, self._path)
        splits = [_split(name, self._path, mesh_dim, p) for mesh_dim, p in enumerate(spec["placements"])]
        return self._one(Cut(shape, *self._meshes[id(mesh)], tuple(s for s in splits if s is not None)))

    def _region(self, metadata: Mapping[str, Any]) -> Region:
        return self._one(Region(tuple(metadata["shard_offsets"]), tuple(metadata["shard_sizes"])))

    def _one(self, value: T) -> T:
        """The same object for equal ones."""
        found: T = self._same.setdefault(value, value)
        return found


def _meeting(index: range | torch.Tensor, low: int, size: int) -> tuple[slice | torch.Tensor, slice | torch.Tensor]:
    """Which of a shard's rows lie in ``[low, low + size)``, and where they lie there."""
    if isinstance(index, range):
        first, last = max(index.start, low), min(index.stop, low + size)
        last = max(first, last)
        return slice(first - index.start, last - index.start), slice(first - low, last - low)
    rows = ((index >= low) & (index < low + size)).nonzero().flatten()
    return rows, index[rows] - low


def _count(rows: slice | torch.Tensor) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def _grid(rows: Sequence[slice | torch.Tensor]) -> tuple[Any, ...]:
    """Index of the rows of each dim, crossed."""
    import torch

    if all(isinstance(run, slice) for run in rows):
        return tuple(rows)
    numbers = [torch.arange(run.start, run.stop) if isinstance(run, slice) else run for run in rows]
    return torch.meshgrid(*numbers, indexing="ij")


def _all_indices(shape: Sequence[int]) -> tuple[range, ...]:
    return tuple(map(range, shape))


def _placed(fqn: str, path: Path, local: torch.Tensor, place: Cut | Region) -> LocalShard:
    if isinstance(place, Region):
        ranges = zip(place.offsets, place.sizes, strict=True)
        return LocalShard(path, local, tuple(range(offset, offset + size) for offset, size in ranges))
    cuts: list[tuple[tuple[int, int], ...]] = [()] * len(place.shape)
    # Left to right, but a strided shard was cut after those on its right: the larger its factor, the later.
    done = [1] * len(place.shape)
    for factor, mesh_dim, dim in sorted(place.splits):
        if factor > 1 and factor != done[dim]:
            raise UnsupportedCheckpointError(
                "a strided shard does not fit its mesh", file=path, tensor=fqn, expected=done[dim], found=factor
            )
        cuts[dim] = (*cuts[dim], (place.mesh[mesh_dim], place.coordinate[mesh_dim]))
        done[dim] *= place.mesh[mesh_dim]
    indices = tuple(map(_cut_index, place.shape, cuts))
    wanted = tuple(len(index) for index in indices)
    if prod(wanted) != local.numel() or (local.numel() and tuple(local.shape) != wanted):
        raise InconsistentCheckpointError(
            "a rank's part of a tensor has another shape than its placements say",
            file=path,
            tensor=fqn,
            expected=list(wanted),
            found=list(local.shape),
        )
    return LocalShard(path, local, indices)


def _cut_index(size: int, cuts: tuple[tuple[int, int], ...]) -> range | torch.Tensor:
    """Indices of a dim that are left after ``cuts``: number of chunks and the one to take, from left to right."""
    if not cuts:
        return range(size)
    *before, (number, at) = cuts
    chunks = _chunks(size, tuple(before), number)
    return _as_run(chunks[at]) if at < len(chunks) else range(0)


@lru_cache(maxsize=64)
def _chunks(size: int, cuts: tuple[tuple[int, int], ...], number: int) -> tuple[torch.Tensor, ...]:
    """All chunks of a dim, for all ranks: each has one of them."""
    import torch

    index = _cut_index(size, cuts)
    return torch.chunk(torch.arange(index.start, index.stop) if isinstance(index, range) else index, number)


def _as_run(index: torch.Tensor) -> range | torch.Tensor:
    """A range where the indices are neighbours."""
    if not len(index):
        return range(0)
    first = int(index[0])
    is_run = int(index[-1]) - first + 1 == len(index) and bool((index.diff() == 1).all())
    return range(first, first + len(index)) if is_run else index


def _split(fqn: str, path: Path, mesh_dim: int, placement: Inert) -> tuple[int, int, int] | None:
    """(split factor, mesh dim, tensor dim) of a shard; None for a replica."""
    kind = getattr(placement, "kind", type(placement).__name__)
    if kind == "Replicate":
        return None
    if kind not in ("Shard", "_StridedShard"):
        raise UnsupportedCheckpointError("partial sums can't be put together", file=path, tensor=fqn, found=kind)
    values = {**dict(zip(("dim", "split_factor"), placement.arguments, strict=False)), **placement.state}
    return int(values.get("split_factor", 1)), mesh_dim, int(values["dim"])


def _mesh_place(mesh: Mapping[str, Any], rank: int, path: Path) -> tuple[Shape, Shape]:
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
    return tuple(sizes), tuple(coordinate)


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
