"""MXNet's array lists: every layout that its source documents, and files that lie."""

from __future__ import annotations

import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ckptflow.errors import (
    CheckpointError,
    CorruptFileError,
    IncompleteCheckpointError,
    UnsafeFileError,
    UnsupportedCheckpointError,
)
from ckptflow.formats.base import ReadOptions
from ckptflow.formats.mxnet import MXNetParams
from ckptflow.manifest import CheckpointManifest
from mxnet_writer import FLAGS, V1, V2, V3, Array, array_list, dense, legacy, shape_bytes, sparse
from reading import read_source


def read(path: Path) -> CheckpointManifest:
    [location] = MXNetParams().find(path)
    return MXNetParams().read(location, ReadOptions())


def values_of(path: Path, fqn: str) -> Array:
    return read_source(read(path).tensors[fqn])


@pytest.mark.parametrize("name", FLAGS)
def test_each_dtype_keeps_its_bits(tmp_path: Path, name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    array = np.arange(-3, 9).astype(np.int64).view(np.uint8).astype(np.uint8)[:12].astype(dtype).reshape(3, 4)
    path = array_list(tmp_path / "m-0001.params", {"arg:w": dense(array)})
    source = read(path).tensors["w"]
    assert source.dtype.name == name
    assert read_source(source).tobytes() == array.tobytes()


@pytest.mark.parametrize("layout", [lambda a: dense(a, V1), dense, lambda a: dense(a, V3), legacy])
def test_each_array_layout_is_read(tmp_path: Path, layout: object) -> None:
    array = np.arange(30, dtype=np.float32).reshape(2, 5, 3)
    path = array_list(tmp_path / "g.params", {"a": layout(array), "b": layout(array[:1] * 2)})  # type: ignore[operator]
    np.testing.assert_array_equal(values_of(path, "a"), array)
    np.testing.assert_array_equal(values_of(path, "b"), array[:1] * 2)


def test_kinds_leave_the_names_and_stay_in_the_manifest(tmp_path: Path) -> None:
    array = np.ones(2, np.float32)
    path = array_list(
        tmp_path / "m-0012.params", {"arg:fc_weight": dense(array), "aux:bn_mean": dense(array), "a:b": dense(array)}
    )
    manifest = read(path)
    assert list(manifest.tensors) == ["fc_weight", "bn_mean", "a:b"]
    assert manifest.kinds == {"fc_weight": "arg", "bn_mean": "aux"}
    assert manifest.global_step is None
    assert "MXNet epoch 12" in manifest.notes


@pytest.mark.parametrize("rows", [[], [0], [5], [0, 1, 5], [1, 3, 4], [0, 1, 2, 3, 4, 5]])
def test_row_sparse_arrays_become_dense(tmp_path: Path, rows: list[int]) -> None:
    values = np.arange(1, 1 + 3 * len(rows), dtype=np.float16).reshape(len(rows), 3)
    expected = np.zeros((6, 3), np.float16)
    expected[rows] = values
    path = array_list(tmp_path / "s.params", {"w": sparse(1, (6, 3), values, np.array(rows, np.int64))})
    np.testing.assert_array_equal(values_of(path, "w"), expected)


def test_csr_arrays_become_dense(tmp_path: Path) -> None:
    expected = np.array([[0, 1, 2, 0], [0, 0, 0, 0], [3, 0, 0, 4], [5, 6, 7, 8]], np.float64)
    indptr = np.array([0, 2, 2, 4, 8], np.int64)
    columns = np.array([1, 2, 0, 3, 0, 1, 2, 3], np.int32)
    path = array_list(
        tmp_path / "s.params",
        {"w": sparse(2, (4, 4), expected[expected != 0], indptr, columns), "z": dense(np.ones(3, np.float32))},
    )
    np.testing.assert_array_equal(values_of(path, "w"), expected)
    np.testing.assert_array_equal(values_of(path, "z"), np.ones(3, np.float32))


def test_an_empty_csr_array_is_all_zeros(tmp_path: Path) -> None:
    nothing = np.zeros(0, np.float32)
    path = array_list(
        tmp_path / "s.params", {"w": sparse(2, (2, 3), nothing, np.zeros(3, np.int64), np.zeros(0, np.int64))}
    )
    np.testing.assert_array_equal(values_of(path, "w"), np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("rows", [[0, 6], [-1, 2], [2, 2], [3, 1]])
def test_row_numbers_that_lie_are_refused(tmp_path: Path, rows: list[int]) -> None:
    values = np.ones((2, 3), np.float32)
    path = array_list(tmp_path / "s.params", {"w": sparse(1, (6, 3), values, np.array(rows, np.int64))})
    with pytest.raises(CorruptFileError, match="indices"):
        read(path)


def test_a_sparse_array_that_grows_absurdly_is_refused(tmp_path: Path) -> None:
    values = np.ones((1, 1), np.float32)
    path = array_list(tmp_path / "s.params", {"w": sparse(1, (2**50, 1), values, np.array([0], np.int64))})
    with pytest.raises(UnsafeFileError, match="absurdly"):
        read(path)


def test_scalars_and_unset_arrays_are_told_apart(tmp_path: Path) -> None:
    unset = struct.pack("<Ii", V2, 0) + shape_bytes(())
    path = array_list(tmp_path / "g.params", {"s": dense(np.float32(7).reshape(()), V3), "unset": unset})
    manifest = read(path)
    assert read_source(manifest.tensors["s"]) == 7
    assert [entry.name for entry in manifest.left_out] == ["unset"]


def test_two_kinds_of_one_name_are_refused(tmp_path: Path) -> None:
    array = dense(np.ones(2, np.float32))
    path = array_list(tmp_path / "m-0001.params", {"arg:w": array, "aux:w": array})
    with pytest.raises(CorruptFileError, match="one name"):
        read(path)


def test_arrays_without_names_are_refused(tmp_path: Path) -> None:
    path = array_list(tmp_path / "m.params", {"w": dense(np.ones(2, np.float32))}, names=[])
    with pytest.raises(UnsupportedCheckpointError, match="no names"):
        read(path)


def test_every_cut_and_every_longer_file_is_refused(tmp_path: Path) -> None:
    whole = array_list(
        tmp_path / "m-0001.params",
        {"arg:w": dense(np.ones((2, 3), np.float32)), "aux:b": legacy(np.ones(2, np.float16))},
    ).read_bytes()
    cut = tmp_path / "cut-0001.params"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        [location] = MXNetParams().find(cut)
        assert MXNetParams().check(location).state == "in-progress"
        with pytest.raises(IncompleteCheckpointError):
            MXNetParams().read(location, ReadOptions())
    cut.write_bytes(whole + b"\0")
    with pytest.raises(CorruptFileError, match="does not end"):
        read(cut)


def test_any_flipped_byte_of_the_headers_gives_values_or_a_refusal(tmp_path: Path) -> None:
    whole = array_list(
        tmp_path / "m-0001.params",
        {
            "arg:w": sparse(1, (4, 2), np.ones((2, 2), np.float32), np.array([1, 3], np.int64)),
            "arg:c": sparse(2, (2, 2), np.ones(1, np.float32), np.array([0, 1, 1], np.int64), np.array([1], np.int64)),
        },
    ).read_bytes()
    path = tmp_path / "flipped-0001.params"
    refused = 0
    for at in range(8, len(whole)):
        for bits in (0x01, 0x80, 0xFF):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bits]) + whole[at + 1 :])
            try:
                manifest = read(path)
            except CheckpointError:
                refused += 1
            else:
                assert all(source.nbytes < 2**30 for source in manifest.tensors.values())
    assert refused > len(whole)


def test_absurd_counts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.params"
    path.write_bytes(struct.pack("<QQQ", 0x112, 0, 2**60) + bytes(64))
    with pytest.raises(UnsafeFileError, match="absurd"):
        read(path)


def test_a_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    outside = array_list(tmp_path / "outside.params", {"w": dense(np.ones(2, np.float32))})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "m-0001.params").symlink_to(outside)
    [location] = MXNetParams().find(tmp_path / "run")
    with pytest.raises(UnsafeFileError, match="leads out"):
        MXNetParams().read(location, ReadOptions())


def test_each_epoch_of_a_directory_is_a_checkpoint(tmp_path: Path) -> None:
    for epoch in ("0001", "0002", "10000"):
        array_list(tmp_path / f"m-{epoch}.params", {"arg:w": dense(np.ones(2, np.float32))})
    (tmp_path / "m-symbol.json").write_text("{}")
    (tmp_path / "m-0001.states").write_bytes(b"x" * 100)
    (tmp_path / "other.params").write_bytes(b"lr = 0.1, not an array list")
    found = [location.path.name for location in MXNetParams().find(tmp_path)]
    assert sorted(found) == ["m-0001.params", "m-0002.params", "m-10000.params"]


@pytest.mark.parametrize(
    ("fixture", "file", "expected"),
    [
        ("mx-module-fp32", "mnist-0002.params", "expected.safetensors"),
        ("mx-module-fp32", "mnist-0001.params", "expected-0001.safetensors"),
        ("mx-mixed-dtypes", "mixed-0007.params", "expected.safetensors"),
        ("mx-gluon-save-parameters", "gluon.params", "expected.safetensors"),
    ],
)
def test_files_that_mxnet_wrote_hold_the_expected_bits(
    fixtures_dir: Path, fixture: str, file: str, expected: str
) -> None:
    from safetensors.numpy import load_file

    manifest = read(fixtures_dir / fixture / "input" / file)
    wanted = {
        n.removeprefix("arg:").removeprefix("aux:"): v for n, v in load_file(fixtures_dir / fixture / expected).items()
    }
    assert set(manifest.tensors) == set(wanted)
    for fqn, array in wanted.items():
        got = read_source(manifest.tensors[fqn])
        assert (got.shape, got.dtype, got.tobytes()) == (array.shape, array.dtype, array.tobytes()), fqn


def test_a_file_that_was_cut_is_refused(fixtures_dir: Path) -> None:
    with pytest.raises(IncompleteCheckpointError, match="truncated"):
        read(fixtures_dir / "bad-mx-truncated-params" / "input" / "mnist-0002.params")
