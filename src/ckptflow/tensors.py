"""Tensors described by byte ranges: what a reader finds and what a transform rearranges.

A ``TensorSource`` is a global tensor that has not been read: shape, dtype, and the pieces that hold it. A
``Piece`` is a strided window on one file and the box of the global tensor that it fills. All functions here are
pure: they make new sources out of old ones and touch no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from ckptflow.dtypes import DType
from ckptflow.errors import InconsistentCheckpointError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that tensors are read from, as it was when its metadata was read.

    Attributes:
        path: absolute path.
        nbytes: size in bytes.
        mtime_ns: modification time in nanoseconds; a later difference means that the source changed.
    """

    path: str
    nbytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a global tensor, and where its elements lie.

    Element ``(i0, i1, …)`` of the box is at byte ``offset_bytes + itemsize * sum(i_k * strides[k])`` of ``file``.

    Attributes:
        file: the file that holds it.
        offset_bytes: byte offset of the box's first element in the file.
        strides: distance between neighbours in each dim, in elements; 0 or more.
        offsets: where the box begins in the global tensor, in elements.
        sizes: extent of the box in each dim, in elements; never 0.
    """

    file: SourceFile
    offset_bytes: int
    strides: Shape
    offsets: Shape
    sizes: Shape


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A global tensor and the pieces that hold it.

    Attributes:
        shape: global shape, in elements.
        dtype: element type of all pieces.
        pieces: boxes that tile the shape: no gap, no overlap (``check_tiling`` proves it).
    """

    shape: Shape
    dtype: DType
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor in its source dtype."""
        return self.numel * self.dtype.itemsize


def contiguous_strides(shape: Sequence[int]) -> Shape:
    """Row-major strides in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def whole(
    file: SourceFile, offset_bytes: int, shape: Shape, dtype: DType, strides: Shape | None = None
) -> TensorSource:
    """A tensor that lies whole in one file, row-major unless ``strides`` (elements) say otherwise."""
    if prod(shape) == 0:
        return TensorSource(shape, dtype, ())
    steps = contiguous_strides(shape) if strides is None else strides
    return TensorSource(shape, dtype, (Piece(file, offset_bytes, steps, (0,) * len(shape), shape),))


def flat_pieces(file: SourceFile, offset_bytes: int, shape: Shape, dtype: DType, start: int, stop: int) -> list[Piece]:
    """Boxes for elements ``[start, stop)`` of a row-major tensor that lie one after another at ``offset_bytes``.

    A flat range of an n-dim tensor is at most ``2 * n - 1`` boxes: ragged head, whole rows, ragged tail.
    """
    if stop <= start:
        return []
    if not shape:
        return [Piece(file, offset_bytes, (), (), ())]
    if len(shape) == 1:
        return [Piece(file, offset_bytes, (1,), (start,), (stop - start,))]
    row = prod(shape[1:])
    strides = contiguous_strides(shape)
    first_whole, last_whole = -(-start // row), stop // row
    pieces: list[Piece] = []

    def ragged(index: int, begin: int, end: int) -> None:
        at = offset_bytes + (index * row + begin - start) * dtype.itemsize
        for p in flat_pieces(file, at, shape[1:], dtype, begin, end):
            pieces.append(Piece(file, p.offset_bytes, (row, *p.strides), (index, *p.offsets), (1, *p.sizes)))

    if first_whole > last_whole:  # begins and ends inside one row
        ragged(last_whole, start - last_whole * row, stop - last_whole * row)
        return pieces
    if start < first_whole * row:
        ragged(first_whole - 1, start - (first_whole - 1) * row, row)
    if last_whole > first_whole:
        at = offset_bytes + (first_whole * row - start) * dtype.itemsize
        box_offsets, box_sizes = (first_whole, *(0,) * (len(shape) - 1)), (last_whole - first_whole, *shape[1:])
        pieces.append(Piece(file, at, strides, box_offsets, box_sizes))
    if stop > last_whole * row:
        ragged(last_whole, 0, stop - last_whole * row)
    return pieces


def window(source: TensorSource, offsets: Sequence[int], sizes: Sequence[int]) -> TensorSource:
    """The box ``[offsets, offsets + sizes)`` of a tensor, as a tensor of shape ``sizes``."""
    pieces = []
    for piece in source.pieces:
        low = tuple(max(a, b) for a, b in zip(piece.offsets, offsets, strict=True))
        high = tuple(min(a + n, b + m) for a, n, b, m in zip(piece.offsets, piece.sizes, offsets, sizes, strict=True))
        if any(h <= lo for lo, h in zip(low, high, strict=True)):
            continue
        skipped = sum((lo - a) * s for lo, a, s in zip(low, piece.offsets, piece.strides, strict=True))
        pieces.append(
            Piece(
                piece.file,
                piece.offset_bytes + skipped * source.dtype.itemsize,
                piece.strides,
                tuple(lo - b for lo, b in zip(low, offsets, strict=True)),
                tuple(h - lo for lo, h in zip(low, high, strict=True)),
            )
        )
    return TensorSource(tuple(sizes), source.dtype, tuple(pieces))


def narrow(source: TensorSource, dim: int, start: int, length: int) -> TensorSource:
    """Rows ``[start, start + length)`` of one dim, as ``torch.narrow``."""
    offsets, sizes = [0] * len(source.shape), list(source.shape)
    offsets[dim], sizes[dim] = start, length
    return window(source, offsets, sizes)


def select(source: TensorSource, dim: int, index: int) -> TensorSource:
    """One index of one dim, which disappears, as ``torch.select``."""
    row = narrow(source, dim, index, 1)

    def drop(values: Shape) -> Shape:
        return values[:dim] + values[dim + 1 :]

    pieces = tuple(Piece(p.file, p.offset_bytes, drop(p.strides), drop(p.offsets), drop(p.sizes)) for p in row.pieces)
    return TensorSource(drop(row.shape), row.dtype, pieces)


def unbind(source: TensorSource) -> list[TensorSource]:
    """All indices of the first dim, as ``torch.unbind``; each is what ``select`` gives."""
    rows: list[list[Piece]] = [[] for _ in range(source.shape[0])]
    for p in source.pieces:
        for index in range(p.sizes[0]):
            at = p.offset_bytes + index * p.strides[0] * source.dtype.itemsize
            rows[p.offsets[0] + index].append(Piece(p.file, at, p.strides[1:], p.offsets[1:], p.sizes[1:]))
    return [TensorSource(source.shape[1:], source.dtype, tuple(pieces)) for pieces in rows]


def permute(source: TensorSource, dims: Sequence[int]) -> TensorSource:
    """The same elements with the dims in another order, as ``torch.permute``."""

    def order(values: Shape) -> Shape:
        return tuple(values[d] for d in dims)

    pieces = tuple(
        Piece(p.file, p.offset_bytes, order(p.strides), order(p.offsets), order(p.sizes)) for p in source.pieces
    )
    return TensorSource(order(source.shape), source.dtype, pieces)


def place(shape: Shape, dtype: DType, parts: Iterable[tuple[Sequence[int], TensorSource]]) -> TensorSource:
    """A tensor of ``shape`` out of smaller ones, each put at its offsets (elements)."""
    pieces = []
    for offsets, part in parts:
        for p in part.pieces:
            moved = tuple(a + b for a, b in zip(p.offsets, offsets, strict=True))
            pieces.append(Piece(p.file, p.offset_bytes, p.strides, moved, p.sizes))
    return TensorSource(shape, dtype, tuple(pieces))


def concatenate(sources: Sequence[TensorSource], dim: int) -> TensorSource:
    """Tensors one after another along ``dim``, as ``torch.cat``."""
    first = sources[0]
    shape, parts = list(first.shape), []
    shape[dim] = 0
    for source in sources:
        offsets = [0] * len(shape)
        offsets[dim] = shape[dim]
        parts.append((offsets, source))
        shape[dim] += source.shape[dim]
    return place(tuple(shape), first.dtype, parts)


def check_tiling(fqn: str, source: TensorSource) -> None:
    """Prove that the pieces fill the shape: inside it, no overlap, no gap.

    Raises:
        InconsistentCheckpointError: they don't; the message says which box is at fault.
    """
    filled = 0
    for piece in source.pieces:
        for offset, size, limit in zip(piece.offsets, piece.sizes, source.shape, strict=True):
            if offset < 0 or size <= 0 or offset + size > limit:
                raise InconsistentCheckpointError(
                    "a shard lies outside its tensor",
                    file=piece.file.path,
                    tensor=fqn,
                    expected=f"inside shape {list(source.shape)}",
                    found=f"offsets {list(piece.offsets)}, sizes {list(piece.sizes)}",
                )
        filled += prod(piece.sizes)
    if len(source.pieces) > 1:
        _check_disjoint(fqn, source)
    if filled != source.numel:
        raise InconsistentCheckpointError(
            "the shards of a tensor leave a gap",
            tensor=fqn,
            expected=f"{source.numel} elements for shape {list(source.shape)}",
            found=f"{filled} elements in {len(source.pieces)} shards",
            fix="a rank's file is missing or belongs to another save; let the trainer write the checkpoint again",
        )


def _check_disjoint(fqn: str, source: TensorSource) -> None:
    """Sweep along the dim that the pieces cut most; only pieces that meet there are compared in full."""
    pieces = source.pieces
    dim = max(range(len(source.shape)), key=lambda d: len({p.offsets[d] for p in pieces}), default=0)
    active: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: p.offsets[dim] if p.offsets else 0):
        active = [a for a in active if a.offsets and a.offsets[dim] + a.sizes[dim] > piece.offsets[dim]]
        for other in active:
            if _meet(piece, other):
                raise InconsistentCheckpointError(
                    "two shards of a tensor overlap",
                    file=piece.file.path,
                    tensor=fqn,
                    expected="each element in one shard",
                    found=f"offsets {list(piece.offsets)} sizes {list(piece.sizes)} and offsets {list(other.offsets)} "
                    f"sizes {list(other.sizes)} of {other.file.path}",
                    fix="the files may be of two saves: move away those of the older one, or save the model again",
                )
        active.append(piece)


def _meet(a: Piece, b: Piece) -> bool:
    return all(x < y + m and y < x + n for x, n, y, m in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
