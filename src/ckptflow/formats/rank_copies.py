"""Joins the ranks' parts of a tensor into one global tensor, and proves that repeated parts are equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ckptflow.errors import InconsistentCheckpointError
from ckptflow.formats.placements import Cuts, boxes, local_shape, possible_cuts, replica_of
from ckptflow.formats.rank_tensors import RankPart, RankTensor, wrong_shape
from ckptflow.formats.torch_tensors import dtype_of
from ckptflow.manifest import EqualSources
from ckptflow.tensors import Piece, Shape, TensorSource, check_tiling, whole
from ckptflow.torchfiles import DTensor, ShardedTensor


def assemble(known: RankTensor, world_size: int) -> tuple[TensorSource, list[EqualSources]]:
    """The global tensor, and copies of it on other ranks that only their bytes can prove equal.

    Raises:
        InconsistentCheckpointError: ranks are missing, their shapes don't fit, or copies are known to differ.
    """
    if isinstance(known.first, ShardedTensor):
        copies = _sharded_copies(known, known.first)
    elif isinstance(known.first, DTensor):
        copies = _dtensor_copies(known, known.first)
    else:
        copies = _plain_copies(known, world_size)
    return _first_and_equal(known, copies)


def _plain_copies(known: RankTensor, world_size: int) -> list[_Copy]:
    missing = [rank for rank in range(world_size) if rank not in known.ranks]
    if missing:
        raise InconsistentCheckpointError(
            "a tensor that every rank should hold whole is missing in some rank files",
            file=known.parts[0].file.path,
            tensor=known.name,
            found=f"not in the files of ranks {missing[:8]}",
            fix="the rank files are of different saves, or the model is spread in a way that ckptflow doesn't know",
        )
    return [_Copy([((0,) * len(p.shape), (0,) * len(p.shape), p.shape, p)], p.shape) for p in known.parts]


@dataclass(slots=True)
class _Copy:
    """One whole copy of a tensor: global offsets, local offsets, sizes, and the part they are in."""

    boxes: list[tuple[Shape, Shape, Shape, RankPart]]
    shape: Shape


def _dtensor_copies(known: RankTensor, first: DTensor) -> list[_Copy]:
    _check_meshes(known)
    copies: dict[object, _Copy] = {}
    for part, cut in zip(known.parts, _fitting_cuts(known, first), strict=True):
        copy = copies.setdefault((part.group, replica_of(first, part.coordinate)), _Copy([], first.shape))
        copy.boxes.extend((*box, part) for box in boxes(first.shape, cut))
    return list(copies.values())


def _check_meshes(known: RankTensor) -> None:
    """Each mesh must be whole: every rank of it has a part, and says that it is cut by that mesh."""
    if not known.parts:
        raise InconsistentCheckpointError(
            "no rank whose file is here is in the device mesh of a tensor", tensor=known.name
        )
    members = Counter(part.group for part in known.parts)
    for group, count in members.items():
        if group is None:
            continue
        absent = next((rank for rank in group.ranks if rank not in known.ranks), None)
        if absent is not None or count != len(group.ranks):
            part = next(part for part in known.parts if part.group is group)
            raise InconsistentCheckpointError(
                "a sharded tensor is missing in a rank's file" if absent is not None else "ranks disagree on a mesh",
                file=part.file.path,
                tensor=known.name,
                expected=f"a shard on each of the ranks {list(group.ranks)}",
                found=f"none in the file of rank {absent}" if absent is not None else "another mesh in some of them",
                fix="the rank files are of different saves; let the trainer write the checkpoint again",
            )


def _fitting_cuts(known: RankTensor, first: DTensor) -> list[Cuts]:
    """The reading of the placements under which every rank's part has the size that it has."""
    readings = list(zip(*(possible_cuts(first, part.coordinate) for part in known.parts), strict=True))
    fitting = [list(reading) for reading in readings if _misfit(known, first.shape, reading) is None]
    if not fitting:
        part, expected = _misfit(known, first.shape, readings[0]) or (known.parts[0], first.shape)
        raise wrong_shape(known.name, part.file, expected, part.shape)
    for other in fitting[1:]:
        if any(boxes(first.shape, a) != boxes(first.shape, b) for a, b in zip(fitting[0], other, strict=True)):
            raise InconsistentCheckpointError(
                "uneven strided shards that can be read in two ways",
                tensor=known.name,
                found=f"shape {list(first.shape)}, mesh {first.mesh.shape}, placements {first.placements}",
                fix="save it with dims that the mesh divides",
            )
    return fitting[0]


def _misfit(known: RankTensor, shape: Shape, reading: Iterable[Cuts]) -> tuple[RankPart, Shape] | None:
    for part, cuts in zip(known.parts, reading, strict=True):
        expected = local_shape(shape, cuts)
        # Empty parts are saved with any shape that has no elements.
        if part.shape != expected and not (part.is_empty and 0 in expected):
            return part, expected
    return None


def _sharded_copies(known: RankTensor, first: ShardedTensor) -> list[_Copy]:
    """Copies by how often a region occurs: ShardedTensor under HSDP repeats each region per replica."""
    copies: list[_Copy] = []
    seen: Counter[tuple[Shape, Shape]] = Counter()
    for part in known.parts:
        if part.is_empty:
            continue
        turn = seen[part.offsets, part.shape]
        seen[part.offsets, part.shape] += 1
        if turn == len(copies):
            copies.append(_Copy([], first.shape))
        copies[turn].boxes.append((part.offsets, (0,) * len(part.shape), part.shape, part))
    copies = copies or [_Copy([], first.shape)]
    for copy in copies:
        check_tiling(known.name, _source(known, copy))
    return copies


def _first_and_equal(known: RankTensor, copies: list[_Copy]) -> tuple[TensorSource, list[EqualSources]]:
    first = copies[0]
    source = _source(known, first)
    equal = []
    for copy in copies[1:]:
        if _surely_equal(known.name, first, copy):
            continue
        equal.append(
            EqualSources(
                fqn=known.name,
                first=source,
                second=_source(known, copy),
                reason="ranks that should hold equal copies differ: rank files of different saves, or a tensor that "
                "each rank has for itself",
            )
        )
    return source, equal


def _surely_equal(name: str, first: _Copy, copy: _Copy) -> bool:
    """Equal by the checksums in the files' directories, without reading the values."""
    ours = {(box[0], box[2]): box[3] for box in first.boxes}
    sure = True
    for offsets, _, sizes, part in copy.boxes:
        other = ours.get((offsets, sizes))
        if other is None or other.crc32 is None or part.crc32 is None:
            sure = False
            continue
        views = [(p.storage_bytes, p.storage_offset, p.strides, p.shape) for p in (other, part)]
        if views[0] != views[1]:
            sure = False
        elif other.crc32 != part.crc32:
            if other.fills_storage and part.fills_storage:
                raise InconsistentCheckpointError(
                    "ranks that should hold equal copies of a tensor differ",
                    file=part.file.path,
                    tensor=name,
                    expected=f"the values of {other.file.path}",
                    found="another checksum",
                    fix="the rank files are of different saves, or each rank has its own values, which can't be merged",
                )
            sure = False
    return sure


def _source(known: RankTensor, copy: _Copy) -> TensorSource:
    name = known.first.dtype_name
    dtype = dtype_of(known.name, name, copy.boxes[0][3].file.path if copy.boxes else "")
    if len(copy.boxes) == 1 and copy.boxes[0][2] == copy.shape:
        part = copy.boxes[0][3]
        return whole(part.file, part.offset_bytes, copy.shape, dtype, part.strides)
    pieces = []
    for offsets, local, sizes, part in copy.boxes:
        skipped = sum(at * step for at, step in zip(local, part.strides, strict=True))
        pieces.append(Piece(part.file, part.offset_bytes + skipped * dtype.itemsize, part.strides, offsets, sizes))
    return TensorSource(copy.shape, dtype, tuple(pieces))
