"""The second reader of MXNet reads every layout of arrays, dense and sparse, and finds one wrong bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from ckptflow.convert import convert
from ckptflow.request import ConvertRequest
from ckptflow.validate.reread.base import UncoveredError
from ckptflow.validate.reread.mxnet import MXNetRereader
from ckptflow.validate.verify import verify
from mxnet_writer import FLAGS, V1, V3, Array, array_list, dense, legacy, sparse
from validation import check_named, flip_bit, raw_bytes, read_whole

SHAPE = (4, 5)
NUMBERS = np.arange(1, 21, dtype=np.float32).reshape(SHAPE)


@pytest.mark.parametrize("name", FLAGS)
def test_each_dtype_keeps_its_bits(tmp_path: Path, name: str) -> None:
    array = NUMBERS.astype(np.dtype(getattr(ml_dtypes, name, name)))
    reader = MXNetRereader(array_list(tmp_path / "m.params", {"arg:w": dense(array)}))
    assert reader.shape("w") == SHAPE
    found = reader.read("w", (1, 0), (2, 5))
    assert str(found.dtype) == f"torch.{name}"
    assert raw_bytes(found) == array[1:3].tobytes()


@pytest.mark.parametrize("layout", [dense, lambda a: dense(a, V1), lambda a: dense(a, V3), legacy])
def test_each_array_layout_is_read(tmp_path: Path, layout: Callable[[Array], bytes]) -> None:
    arrays = {"arg:w": layout(NUMBERS), "aux:mean": layout(NUMBERS[0]), "plain": layout(2 * NUMBERS)}
    reader = MXNetRereader(array_list(tmp_path / "m.params", arrays))
    for name, wanted in {"w": NUMBERS, "mean": NUMBERS[0], "plain": 2 * NUMBERS}.items():
        assert torch.equal(read_whole(reader, name, most_elements=3), torch.from_numpy(wanted))
    assert reader.shape("arg:w") is None


def test_sparse_arrays_are_dense(tmp_path: Path) -> None:
    rows, wanted = np.array([0, 3]), np.zeros(SHAPE, np.float32)
    wanted[rows] = NUMBERS[:2]
    columns, bounds = np.array([1, 4, 0]), np.array([0, 2, 2, 3, 3])
    matrix = np.zeros(SHAPE, np.float32)
    matrix[0, 1], matrix[0, 4], matrix[2, 0] = 7, 8, 9
    stored = np.array([7, 8, 9], np.float32)
    arrays = {"rows": sparse(1, SHAPE, NUMBERS[:2], rows), "csr": sparse(2, SHAPE, stored, bounds, columns)}
    reader = MXNetRereader(array_list(tmp_path / "m.params", arrays))
    for name, expected in {"rows": wanted, "csr": matrix}.items():
        assert torch.equal(read_whole(reader, name, most_elements=3), torch.from_numpy(expected))


def test_another_file_is_not_covered(tmp_path: Path) -> None:
    (tmp_path / "m.params").write_bytes(bytes(64))
    with pytest.raises(UncoveredError, match="no list"):
        MXNetRereader(tmp_path / "m.params")
    path = array_list(tmp_path / "m.params", {"w": dense(NUMBERS)})
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UncoveredError, match="too early"):
        MXNetRereader(path)


@pytest.mark.parametrize("name", ["mx-gluon-save-parameters", "mx-mixed-dtypes", "mx-module-fp32"])
def test_real_files_are_compared_through_it_and_one_wrong_bit_is_found(
    fixtures_dir: Path, name: str, tmp_path: Path
) -> None:
    source = max((fixtures_dir / name / "input").glob("*.params"))
    convert(ConvertRequest(path=source, out=tmp_path / "out", dtype="source"))
    check = check_named(verify(tmp_path / "out", against=source), "values")
    assert (check.status, check.figures["source read through"]) == ("passed", MXNetRereader.how)
    (weights,) = (tmp_path / "out").glob("*.safetensors")
    flip_bit(weights, -1)
    check = check_named(verify(tmp_path / "out", against=source), "values")
    assert (check.status, check.figures["differing elements"]) == ("failed", 1)
