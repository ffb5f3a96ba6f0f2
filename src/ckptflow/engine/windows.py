"""Which windows of which files make up a range of a tensor's elements. Pure arithmetic; no file is touched."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from ckptflow.tensors import Piece, Shape, TensorSource, contiguous_strides


@dataclass(frozen=True, slots=True)
class Window:
    """A strided window on a file and the box of a flat output range that it fills.

    The box is ``out[start : start + prod(box)].reshape(box)[corner : corner + sizes]``.

    Attributes:
        piece: the piece that the window lies in.
        offset_bytes: byte offset of the first element in the piece's file.
        strides: distance between neighbours in the file, in elements.
        sizes: extent of the window, in elements.
        start: where the box begins in the flat range, in elements.
        box: shape of the box.
        corner: where the window begins in the box.
    """

    piece: Piece
    offset_bytes: int
    strides: Shape
    sizes: Shape
    start: int
    box: Shape
    corner: Shape


def flat_boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Offsets and sizes of the boxes that elements ``[start, stop)`` of a row-major tensor are made of, in order.

    At most ``2 * len(shape) - 1`` boxes: ragged head, whole rows, ragged tail.
    """
    if stop <= start:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row, inner = prod(shape[1:]), shape[1:]
    first_whole, last_whole = -(-start // row), stop // row
    if first_whole > last_whole:  # begins and ends inside one row
        for offsets, sizes in flat_boxes(inner, start - last_whole * row, stop - last_whole * row):
            yield (last_whole, *offsets), (1, *sizes)
        return
    for offsets, sizes in flat_boxes(inner, row - (first_whole * row - start), row) if start % row else ():
        yield (first_whole - 1, *offsets), (1, *sizes)
    if last_whole > first_whole:
        yield (first_whole, *(0,) * len(inner)), (last_whole - first_whole, *inner)
    for offsets, sizes in flat_boxes(inner, 0, stop - last_whole * row):
        yield (last_whole, *offsets), (1, *sizes)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A piece with the flat range from its first to its last element; ``dense`` if it fills that range in order."""

    piece: Piece
    start: int
    stop: int
    dense: bool


class PieceIndex:
    """The pieces of one tensor, sorted so that those of a flat range are found without looking at all."""

    def __init__(self, source: TensorSource) -> None:
        self.shape = source.shape
        self.itemsize = source.dtype.itemsize
        steps = contiguous_strides(source.shape)
        self._placed = sorted((_place(p, source.shape, steps) for p in source.pieces), key=lambda p: p.start)
        self._starts = [p.start for p in self._placed]
        self._stops = list(accumulate((p.stop for p in self._placed), max))

    def windows(self, start: int, stop: int) -> Iterator[Window]:
        """The windows that fill elements ``[start, stop)``, in no particular order."""
        low, high = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        boxes: list[tuple[int, Shape, Shape]] | None = None
        for placed in self._placed[low:high]:
            if placed.stop <= start:
                continue
            if placed.dense:
                yield self._dense_window(placed, start, stop)
                continue
            if boxes is None:
                boxes = list(self._numbered_boxes(start, stop))
            for at, offsets, sizes in boxes:
                window = _meet(placed.piece, self.itemsize, at, offsets, sizes)
                if window is not None:
                    yield window

    def piece_at(self, index: int) -> Piece:
        """The piece that holds the element with that flat index."""
        return next(iter(self.windows(index, index + 1))).piece

    def _dense_window(self, placed: _Placed, start: int, stop: int) -> Window:
        low, high = max(start, placed.start), min(stop, placed.stop)
        offset = placed.piece.offset_bytes + (low - placed.start) * self.itemsize
        return Window(placed.piece, offset, (1,), (high - low,), low - start, (high - low,), (0,))

    def _numbered_boxes(self, start: int, stop: int) -> Iterator[tuple[int, Shape, Shape]]:
        at = 0
        for offsets, sizes in flat_boxes(self.shape, start, stop):
            yield at, offsets, sizes
            at += prod(sizes)


def _place(piece: Piece, shape: Shape, steps: Shape) -> _Placed:
    start = sum(o * s for o, s in zip(piece.offsets, steps, strict=True))
    last = start + sum((n - 1) * s for n, s in zip(piece.sizes, steps, strict=True))
    dense = last + 1 - start == prod(piece.sizes) and all(
        stride == step or size == 1 for stride, step, size in zip(piece.strides, steps, piece.sizes, strict=True)
    )
    return _Placed(piece, start, last + 1, dense)


def _meet(piece: Piece, itemsize: int, at: int, offsets: Shape, box: Shape) -> Window | None:
    low = tuple(map(max, piece.offsets, offsets))
    sizes = tuple(
        min(a + n, b + m) - lo for a, n, b, m, lo in zip(piece.offsets, piece.sizes, offsets, box, low, strict=True)
    )
    if any(n <= 0 for n in sizes):
        return None
    skipped = sum((lo - a) * s for lo, a, s in zip(low, piece.offsets, piece.strides, strict=True))
    corner = tuple(lo - b for lo, b in zip(low, offsets, strict=True))
    return Window(piece, piece.offset_bytes + skipped * itemsize, piece.strides, sizes, at, box, corner)
