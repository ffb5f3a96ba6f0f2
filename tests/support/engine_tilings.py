"""Random tensors cut into pieces of any element order with gaps between, and the files that hold them."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from ckptflow.dtypes import DTYPES
from ckptflow.tensors import TensorSource, check_tiling
from engine_sources import SourceWriter, piece

Box = tuple[tuple[int, ...], tuple[int, ...]]


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A random tiling: boxes are cut in two along random dims."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        number = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[number]
        dims = [d for d, n in enumerate(sizes) if n > 1]
        if not dims:
            continue
        dim = draw(st.sampled_from(dims))
        cut = draw(st.integers(1, sizes[dim] - 1))
        low, high = list(sizes), list(sizes)
        low[dim], high[dim] = cut, sizes[dim] - cut
        moved = list(offsets)
        moved[dim] += cut
        boxes[number : number + 1] = [(offsets, tuple(low)), (tuple(moved), tuple(high))]
    return boxes


@st.composite
def stored_tensors(draw: st.DrawFn) -> tuple[np.ndarray, list[tuple[Box, list[int], list[int]]]]:
    """Values, and pieces of them: box, order of the dims in the file, gaps after the rows of each dim."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=4)))
    values = np.arange(prod(shape), dtype=np.float32).reshape(shape) + 1
    pieces = []
    for box in draw(boxes_of(shape)):
        order = draw(st.permutations(range(len(shape))))
        gaps = [draw(st.integers(0, 3)) for _ in shape]
        pieces.append((box, list(order), gaps))
    return values, pieces


def write_pieces(directory: Path, values: np.ndarray, pieces: list[tuple[Box, list[int], list[int]]]) -> TensorSource:
    """The tensor whose pieces lie in two files by turns."""
    writers = [SourceWriter(directory / f"rank{n}") for n in range(2)]
    stored = []
    for number, ((offsets, sizes), order, gaps) in enumerate(pieces):
        part = values[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        stored.append((number % 2, writers[number % 2].add(part, order, gaps), offsets, sizes))
    files = [writer.finish() for writer in writers]
    source = TensorSource(values.shape, DTYPES["float32"], tuple(piece(files[n], at, o, s) for n, at, o, s in stored))
    check_tiling("w", source)
    return source
