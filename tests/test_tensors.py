"""Piece algebra gives what numpy gives, and tilings with gaps or overlaps are refused."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptflow.dtypes import dtype_named
from ckptflow.errors import InconsistentCheckpointError
from ckptflow.tensors import (
    Piece,
    SourceFile,
    TensorSource,
    check_tiling,
    concatenate,
    flat_pieces,
    narrow,
    permute,
    place,
    select,
    unbind,
    whole,
    window,
)

FLOAT32 = dtype_named("float32")
FILE = SourceFile(path="weights", nbytes=1 << 30, mtime_ns=0)
ELEMENTS = np.arange(10_000, dtype=np.float32)


def gather(source: TensorSource) -> np.ndarray:
    """The elements of a source over ``ELEMENTS`` as the file's content, one by one."""
    result = np.full(source.shape, -1, dtype=np.float32)
    for piece in source.pieces:
        for index in np.ndindex(*piece.sizes):
            at = piece.offset_bytes // 4 + sum(i * s for i, s in zip(index, piece.strides, strict=True))
            result[tuple(i + o for i, o in zip(index, piece.offsets, strict=True))] = ELEMENTS[at]
    return result


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(shape=shapes, data=st.data())
def test_a_flat_range_becomes_boxes_that_hold_exactly_its_elements(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = prod(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=4)))
    bounds = [0, *cuts, numel]
    pieces: list[Piece] = []
    for start, stop in pairwise(bounds):
        boxes = flat_pieces(FILE, start * 4, shape, FLOAT32, start, stop)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        pieces += boxes
    source = TensorSource(shape, FLOAT32, tuple(pieces))
    check_tiling("w", source)
    np.testing.assert_array_equal(gather(source), ELEMENTS[:numel].reshape(shape))


@given(shape=shapes, data=st.data())
def test_windows_and_permutations_compose_as_in_numpy(shape: tuple[int, ...], data: st.DataObject) -> None:
    expected = ELEMENTS[: prod(shape)].reshape(shape)
    source = whole(FILE, 0, shape, FLOAT32)
    dims = data.draw(st.permutations(range(len(shape))))
    source, expected = permute(source, dims), expected.transpose(dims)
    offsets = [data.draw(st.integers(0, n - 1)) for n in expected.shape]
    sizes = [data.draw(st.integers(1, n - o)) for n, o in zip(expected.shape, offsets, strict=True)]
    source = window(source, offsets, sizes)
    expected = expected[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    check_tiling("w", source)
    np.testing.assert_array_equal(gather(source), expected)
    for row, wanted in zip(unbind(source), expected, strict=True):
        check_tiling("w", row)
        np.testing.assert_array_equal(gather(row), wanted)
    dim = data.draw(st.integers(0, len(sizes) - 1))
    np.testing.assert_array_equal(gather(select(source, dim, 0)), expected.take(0, axis=dim))


@given(shape=shapes, data=st.data())
def test_what_is_cut_apart_can_be_put_together(shape: tuple[int, ...], data: st.DataObject) -> None:
    source = whole(FILE, 0, shape, FLOAT32)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(1, shape[dim]))
    parts = [narrow(source, dim, 0, cut)]
    if cut < shape[dim]:
        parts.append(narrow(source, dim, cut, shape[dim] - cut))
    joined = concatenate(parts, dim)
    check_tiling("w", joined)
    np.testing.assert_array_equal(gather(joined), gather(source))


def test_a_missing_shard_is_a_gap() -> None:
    rows = whole(FILE, 0, (2, 3), FLOAT32)
    with pytest.raises(InconsistentCheckpointError, match="leave a gap") as error:
        check_tiling("layer.weight", place((4, 3), FLOAT32, [((0, 0), rows)]))
    assert "layer.weight" in str(error.value)


def test_a_shard_that_comes_twice_is_an_overlap() -> None:
    rows = whole(FILE, 0, (2, 3), FLOAT32)
    with pytest.raises(InconsistentCheckpointError, match="overlap"):
        check_tiling("layer.weight", place((4, 3), FLOAT32, [((0, 0), rows), ((1, 0), rows)]))


def test_a_shard_outside_the_shape_is_refused() -> None:
    rows = whole(FILE, 0, (2, 3), FLOAT32)
    with pytest.raises(InconsistentCheckpointError, match="outside"):
        check_tiling("layer.weight", place((4, 3), FLOAT32, [((3, 0), rows)]))


def test_a_scalar_has_one_piece() -> None:
    check_tiling("step", whole(FILE, 8, (), FLOAT32))
    with pytest.raises(InconsistentCheckpointError):
        check_tiling("step", TensorSource((), FLOAT32, ()))


def test_library_errors_survive_pickling_with_all_their_facts() -> None:
    # Prefect carries exceptions between processes.
    import copy

    error = InconsistentCheckpointError("differs", file=Path("a"), tensor="w", expected=1, found=2, fix="look")
    assert str(copy.copy(error)) == str(error)
    assert "what to do: look" in str(error)
