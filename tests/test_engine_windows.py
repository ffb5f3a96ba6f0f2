"""Whatever the tiling, element order and gaps of the pieces, the output is the global tensor."""

from __future__ import annotations

import tempfile
import threading
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptflow.dtypes import DTYPES, numpy_dtype
from ckptflow.engine import EngineOptions, write_weight_file
from ckptflow.engine import gather as gather_module
from ckptflow.engine.gather import Gatherer
from ckptflow.engine.sources import SourceFiles
from ckptflow.engine.windows import PieceIndex, flat_boxes
from ckptflow.tensors import Piece, TensorSource, check_tiling, concatenate, flat_pieces, narrow, permute, select, whole
from engine_sources import describe, planned, read_output, same_bits, store, weight_file
from engine_tilings import stored_tensors, write_pieces


@settings(max_examples=150, deadline=None)
@given(stored=stored_tensors(), scratch=st.integers(1, 40), gap=st.integers(0, 20), data=st.data())
def test_any_range_of_any_tiling_is_read_right(stored, scratch: int, gap: int, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    values, pieces = stored
    start = data.draw(st.integers(0, values.size - 1))
    stop = data.draw(st.integers(start + 1, values.size))
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch, SourceFiles() as files:
        patch.setattr(gather_module, "_BRIDGED_GAP_BYTES", gap)
        source = write_pieces(Path(name), values, pieces)
        for target in ("float32", "bfloat16", "float64"):
            out = np.zeros(stop - start, numpy_dtype(DTYPES[target]))
            Gatherer(files, 4 * scratch, threading.Event()).fill(out, source, PieceIndex(source), start, DTYPES[target])
            assert same_bits(out, values.reshape(-1)[start:stop].astype(out.dtype))


@settings(max_examples=30, deadline=None)
@given(stored=stored_tensors())
def test_a_weight_file_of_any_tiling_holds_the_global_tensor(stored) -> None:  # type: ignore[no-untyped-def]
    values, pieces = stored
    with tempfile.TemporaryDirectory() as name:
        source = write_pieces(Path(name), values, pieces)
        write_weight_file(weight_file(planned("w", source)), Path(name) / "out", EngineOptions(durable=False))
        assert same_bits(read_output(Path(name) / "out")["w"], values)


@given(shape=st.lists(st.integers(1, 5), max_size=4).map(tuple), data=st.data())
def test_the_boxes_of_a_flat_range_hold_its_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numbers = np.arange(prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, numbers.size))
    stop = data.draw(st.integers(start, numbers.size))
    found = [
        numbers[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1)
        for box in flat_boxes(shape, start, stop)
    ]
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert np.concatenate([*found, np.zeros(0, int)]).tolist() == list(range(start, stop))


def test_a_stride_of_zero_repeats_the_same_bytes(tmp_path: Path) -> None:
    row = np.arange(5, dtype=np.float32)
    (tmp_path / "in").write_bytes(row.tobytes())
    file = describe(tmp_path / "in")
    across = TensorSource((4, 5), DTYPES["float32"], (Piece(file, 0, (0, 1), (0, 0), (4, 5)),))
    down = TensorSource((5, 4), DTYPES["float32"], (Piece(file, 0, (1, 0), (0, 0), (5, 4)),))
    write_weight_file(weight_file(planned("a", across), planned("d", down, "float64")), tmp_path / "out")
    found = read_output(tmp_path / "out")
    np.testing.assert_array_equal(found["a"], np.tile(row, (4, 1)))
    np.testing.assert_array_equal(found["d"], np.tile(row[:, None], (1, 4)))


def test_overlapping_strides_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    values = np.arange(8, dtype=np.float32)
    (tmp_path / "in").write_bytes(values.tobytes())
    windows = TensorSource((6, 3), DTYPES["float32"], (Piece(describe(tmp_path / "in"), 0, (1, 1), (0, 0), (6, 3)),))
    write_weight_file(weight_file(planned("w", windows)), tmp_path / "out")
    np.testing.assert_array_equal(
        read_output(tmp_path / "out")["w"], np.lib.stride_tricks.sliding_window_view(values, 3)
    )


def test_a_large_transposed_tensor_takes_few_reads_and_little_memory(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((1500, 3100), np.float32)
    source = permute(store(tmp_path / "in", values, DTYPES["float32"]), (1, 0))
    record = write_weight_file(weight_file(planned("w", source, "bfloat16")), tmp_path / "out")
    assert same_bits(read_output(tmp_path / "out")["w"], values.T.astype(numpy_dtype(DTYPES["bfloat16"])))
    assert record.read_bytes < 8 * values.nbytes


def test_column_shards_are_read_once_and_joined(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((700, 1800), np.float32)
    shards = [
        store(tmp_path / f"rank{n}", part, DTYPES["float32"]) for n, part in enumerate(np.array_split(values, 4, 1))
    ]
    record = write_weight_file(
        weight_file(planned("w", concatenate(shards, 1), "float16")),
        tmp_path / "out",
        EngineOptions(memory_budget_bytes=600_000),
    )
    assert same_bits(read_output(tmp_path / "out")["w"], values.astype(np.float16))
    assert record.read_bytes == values.nbytes


def test_flat_partitions_that_cut_rows_are_joined(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((61, 5, 7), np.float32)
    flat = values.reshape(-1)
    cuts = [0, 3, 400, 401, 1777, flat.size]
    pieces: list[Piece] = []
    for number, (a, b) in enumerate(pairwise(cuts)):
        part = store(tmp_path / f"rank{number}", flat[a:b], DTYPES["float32"])
        pieces += flat_pieces(part.pieces[0].file, 3, values.shape, part.dtype, a, b)
    source = TensorSource(values.shape, DTYPES["float32"], tuple(pieces))
    check_tiling("w", source)
    record = write_weight_file(weight_file(planned("w", source)), tmp_path / "out")
    assert same_bits(read_output(tmp_path / "out")["w"], values)
    assert record.read_bytes == values.nbytes


def test_windows_of_windows_are_read_right(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 255, (6, 10, 8)).astype(np.int16)
    source = store(tmp_path / "in", values, DTYPES["int16"])
    view = select(narrow(permute(source, (2, 0, 1)), 2, 3, 5), 0, 6)
    write_weight_file(weight_file(planned("w", view)), tmp_path / "out")
    assert same_bits(read_output(tmp_path / "out")["w"], np.ascontiguousarray(values[:, 3:8, 6]))


def test_more_rank_files_than_descriptors_may_be_open(tmp_path: Path) -> None:
    values = np.arange(600, dtype=np.float32)
    shards = [store(tmp_path / f"rank{n}", values[n : n + 1], DTYPES["float32"]) for n in range(600)]
    pair = concatenate([concatenate(shards, 0), concatenate(shards, 0)], 0)
    write_weight_file(weight_file(planned("w", pair)), tmp_path / "out")
    np.testing.assert_array_equal(read_output(tmp_path / "out")["w"], np.tile(values, 2))


def test_a_whole_tensor_reads_each_byte_once(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(300_000, np.float32)
    (tmp_path / "in").write_bytes(values.tobytes())
    source = whole(describe(tmp_path / "in"), 0, (300, 1000), DTYPES["float32"])
    record = write_weight_file(weight_file(planned("w", source, "bfloat16")), tmp_path / "out")
    assert record.read_bytes == values.nbytes
