"""FSDP rank files, put together by cutting index tensors with ``torch.chunk`` as the trainer's library cut the weights.

Each rank's part of each dim is a list of global indices: start with all of them and chunk once per mesh dim that
shards it, in the order in which torch sharded. That says where every local row belongs, for any mixture of FSDP,
HSDP and tensor parallelism, uneven and empty shards included, without a formula for offsets.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ckptflow.errors import HelperError, InconsistentCheckpointError, UnsupportedCheckpointError
from ckptflow.processes.askprocess import run_module
from ckptflow.processes.pools import windowed
from ckptflow.tensors import Shape, contiguous_strides
from ckptflow.validate.reread.base import by_plain_name

if TYPE_CHECKING:
    import torch

RANK_FILE = re.compile(r"_world_size_(\d+)_rank_(\d+)\.pt$")

_PROCESS = "ckptflow.validate.reread.rank_process"
_BATCHES_PER_WORKER = 4
"""Enough that no worker is idle for long in the end; each costs a tenth of a second."""
_SECONDS_PER_FILE = 3600.0


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


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank holds of a tensor, apart from where it lies in the file.

    Attributes:
        dtype: torch's name.
        shape: of the rank's own values.
        strides: in elements.
        place: in the whole; None for a tensor that every rank holds whole.
    """

    dtype: str
    shape: Shape
    strides: Shape
    place: Cut | Region | None


@dataclass(frozen=True, slots=True)
class Kind:
    """What many tensors of a rank have in common: the shape of the whole, and of each part."""

    shape: Shape
    parts: tuple[Part, ...]


Tensors = dict[str, tuple[Kind, tuple[int, ...]]]
"""Name → kind, and where each part begins in the file, in bytes."""


class FsdpRereader:
    """State dicts of all ranks, loaded by torch in processes of their own, and mapped here.

    Raises:
        InconsistentCheckpointError: a file was saved by another rank than its name says.
        UnsupportedCheckpointError: partial sums.
        HelperError: a process that loads rank files died.
    """

    how = "torch.load of every rank file, placed by torch.chunk of the indices"

    def __init__(self, files: Sequence[Path]) -> None:
        self._ranks: dict[int, tuple[Path, Tensors]] = {}
        same: dict[Any, Any] = {}
        for path, content in zip(files, _loaded(files), strict=True):
            match = RANK_FILE.search(path.name)
            if match is None:
                raise RuntimeError(f"{path.name} does not name its rank")
            rank = int(match.group(2))
            self._ranks[rank] = path, _tensors_of(path, rank, content, same)
        names = [name for _, state in self._ranks.values() for name in state]
        self._look_up = by_plain_name(list(dict.fromkeys(names)))
        self._shards = lru_cache(maxsize=4)(self._find_shards)
        self._mapped = cache(_map_file)

    def shape(self, fqn: str) -> Shape | None:
        name = self._look_up(fqn)
        return None if name is None else next((s[name][0].shape for _, s in self._ranks.values() if name in s), None)

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
            kind, offsets = state[name]
            for part, offset in zip(kind.parts, offsets, strict=True):
                local = self._local(path, part, offset)
                if part.place is None:
                    return [LocalShard(path, local, _all_indices(local.shape))]
                found.append(_placed(fqn, path, local, part.place))
        return [s for s in found if s.local.numel()] or found[:1]

    def _local(self, path: Path, part: Part, offset: int) -> torch.Tensor:
        import torch

        dtype: torch.dtype = getattr(torch, part.dtype)
        empty = torch.empty(0, dtype=dtype)
        if 0 in part.shape:
            return empty.reshape(part.shape)
        span = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.strides, strict=True))
        storage = self._mapped(path)[offset : offset + span * dtype.itemsize]
        return empty.set_(storage, 0, part.shape, part.strides)


def _map_file(path: Path) -> torch.UntypedStorage:
    import torch

    storage = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
    return cast("torch.UntypedStorage", storage)


def _loaded(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """What torch says of each file, in order; several processes load them."""
    workers = len(os.sched_getaffinity(0))
    size = -(-len(files) // (workers * _BATCHES_PER_WORKER))
    batches = [files[first : first + size] for first in range(0, len(files), size)]
    with ThreadPoolExecutor(workers, "ckptflow-load") as pool:
        for lines in windowed(pool, _ask, batches, workers + 1):
            yield from map(json.loads, lines)


def _ask(batch: Sequence[Path]) -> list[str]:
    question = json.dumps([os.path.abspath(path) for path in batch])
    seconds = _SECONDS_PER_FILE * len(batch)
    try:
        done = run_module(_PROCESS, batch[0], question, seconds)
    except TimeoutError as error:
        raise HelperError(
            "torch did not load rank files in time", file=batch[0], expected=f"{len(batch)} files in {seconds:.0f} s"
        ) from error
    lines = done.stdout.splitlines()
    if done.returncode != 0 or len(lines) != len(batch):
        raise HelperError(
            "the process in which torch loads rank files died",
            file=batch[min(len(lines), len(batch) - 1)],
            found=f"exit status {done.returncode}: {done.stderr.strip()[-2000:]}",
            fix="run it again, with more memory if that ran out",
        )
    return lines


def _tensors_of(path: Path, rank: int, content: Mapping[str, Any], same: dict[Any, Any]) -> Tensors:
    """A rank's tensors from what the process said; equal kinds of all ranks are one object, of which there are few."""
    if "refused" in content:
        raise RuntimeError(content["refused"])
    meshes = [_mesh_place(mesh, rank, path) for mesh in content["meshes"]]
    named = {number: name for name, (number, *_) in content["tensors"].items()}
    kinds = []
    for number, kind in enumerate(content["kinds"]):
        made = _kind(named[number], path, kind, meshes)
        kinds.append(same.setdefault(made, made))
    return {
        sys.intern(name): (kinds[number], tuple(offsets)) for name, (number, *offsets) in content["tensors"].items()
    }


def _kind(name: str, path: Path, kind: Mapping[str, Any], meshes: Sequence[tuple[Shape, Shape]]) -> Kind:
    shape = tuple(kind["shape"])
    parts = []
    for part in kind["parts"]:
        place = part["place"]
        if place is not None and "mesh" in place:
            splits = [_split(name, path, mesh_dim, p) for mesh_dim, p in enumerate(place["placements"])]
            mesh, coordinate = meshes[place["mesh"]]
            place = Cut(shape, mesh, coordinate, tuple(s for s in splits if s is not None))
        elif place is not None:
            place = Region(tuple(place["offsets"]), tuple(place["sizes"]))
        parts.append(Part(part["dtype"], tuple(part["shape"]), tuple(part["strides"]), place))
    return Kind(shape, tuple(parts))


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
    return chunks[at] if at < len(chunks) else range(0)


@lru_cache(maxsize=64)
def _chunks(size: int, cuts: tuple[tuple[int, int], ...], number: int) -> tuple[range | torch.Tensor, ...]:
    """All chunks of a dim, for all ranks: each has one of them."""
    import torch

    index = _cut_index(size, cuts)
    rows = torch.arange(index.start, index.stop) if isinstance(index, range) else index
    return tuple(map(_as_run, torch.chunk(rows, number)))


def _as_run(index: torch.Tensor) -> range | torch.Tensor:
    """A range where the indices are neighbours."""
    if not len(index):
        return range(0)
    first = int(index[0])
    is_run = int(index[-1]) - first + 1 == len(index) and bool((index.diff() == 1).all())
    return range(first, first + len(index)) if is_run else index


def _split(fqn: str, path: Path, mesh_dim: int, placement: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """(split factor, mesh dim, tensor dim) of a shard; None for a replica."""
    kind = placement["kind"]
    if kind == "Replicate":
        return None
    if kind not in ("Shard", "_StridedShard"):
        raise UnsupportedCheckpointError("partial sums can't be put together", file=path, tensor=fqn, found=kind)
    return int(placement.get("split_factor", 1)), mesh_dim, int(placement["dim"])


def _mesh_place(mesh: Mapping[str, Any], rank: int, path: Path) -> tuple[Shape, Shape]:
    """Sizes of the mesh dims, and the rank's coordinate on each.

    Raises:
        InconsistentCheckpointError: the mesh was saved by another rank than the file's name says.
    """
    ranks, coordinate = mesh["ranks"], []
    if "axes" in mesh:
        axes = [(_flat(shape), _flat(stride)) for shape, stride in mesh["axes"]]
        sizes = [prod(shape) for shape, _ in axes]
        coordinate = [_along(ranks.index(rank), shape, stride) for shape, stride in axes]
    else:
        sizes = mesh["sizes"]
        if rank in ranks:
            steps = contiguous_strides(sizes)
            coordinate = [ranks.index(rank) // step % size for size, step in zip(sizes, steps, strict=True)]
    if mesh["saved"] not in (None, coordinate):
        raise InconsistentCheckpointError(
            "a rank file was saved by another rank than its name says",
            file=path,
            expected=f"mesh coordinate {coordinate} for rank {rank}",
            found=f"mesh coordinate {mesh['saved']}",
            fix="the files were renamed or swapped; copy the checkpoint again",
        )
    return tuple(sizes), tuple(coordinate)


def _flat(value: Any) -> list[int]:
    return [n for item in value for n in _flat(item)] if isinstance(value, (tuple, list)) else [int(value)]


def _along(position: int, sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Coordinate on an axis, which may be several root axes flattened into one."""
    coordinate = 0
    for size, stride in zip(sizes, strides, strict=True):
        coordinate = coordinate * size + position // stride % size
    return coordinate
