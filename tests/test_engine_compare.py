"""Sources that must be equal are compared bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckptflow.dtypes import DTYPES, numpy_dtype
from ckptflow.engine import check_equal_sources, sources_equal
from ckptflow.errors import InconsistentCheckpointError, SourceChangedError
from ckptflow.manifest import EqualSources
from ckptflow.tensors import TensorSource, concatenate, permute
from engine_sources import store

BFLOAT16 = numpy_dtype(DTYPES["bfloat16"])


def pair(first: TensorSource, second: TensorSource) -> EqualSources:
    return EqualSources(fqn="lm_head.weight", first=first, second=second, reason="the config ties them")


def stored(path: Path, values: np.ndarray) -> TensorSource:
    return store(path, values, DTYPES[values.dtype.name])


def test_equal_bits_in_any_tiling_and_order_pass(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((800, 901), np.float32)
    columns = [stored(tmp_path / f"c{n}", part) for n, part in enumerate(np.array_split(values, 3, 1))]
    turned = permute(stored(tmp_path / "t", values.T), (1, 0))
    seen: list[int] = []
    check_equal_sources([pair(concatenate(columns, 1), turned)], progress=seen.append)
    assert sum(seen) == values.nbytes
    assert sources_equal(concatenate(columns, 1), turned)


def test_the_first_difference_is_named_with_both_values(tmp_path: Path) -> None:
    first = np.zeros((700, 1000), np.float32)
    second = first.copy()
    second[650, 3], second[699, 0] = 1.5, 2
    with pytest.raises(InconsistentCheckpointError, match="the config ties them") as caught:
        check_equal_sources([pair(stored(tmp_path / "a", first), stored(tmp_path / "b", second))])
    assert caught.value.tensor == "lm_head.weight"
    assert caught.value.expected == "0.0 at index [650, 3]"
    assert caught.value.found == "1.5"
    assert str(tmp_path / "a") in str(caught.value)
    assert not sources_equal(stored(tmp_path / "a", first), stored(tmp_path / "b", second))


def test_zeros_of_different_sign_differ(tmp_path: Path) -> None:
    assert not sources_equal(
        stored(tmp_path / "a", np.array([0.0], np.float32)), stored(tmp_path / "b", np.array([-0.0], np.float32))
    )


def test_equal_nan_bits_are_equal(tmp_path: Path) -> None:
    nan = np.array([np.nan, 1], np.float32)
    assert sources_equal(stored(tmp_path / "a", nan), stored(tmp_path / "b", nan))


def test_a_master_equals_its_rounded_copy(tmp_path: Path) -> None:
    master = np.random.default_rng(0).standard_normal(10_000, np.float32)
    master[7] = np.nan
    copy = master.astype(BFLOAT16)
    copy.view(np.uint16)[7] = 0xFFFF  # torch's vectorised cast writes this NaN
    first, second = stored(tmp_path / "a", master), store(tmp_path / "b", copy, DTYPES["bfloat16"])
    check_equal_sources([pair(first, second)])
    copy.view(np.uint16)[9_000] += 1
    assert not sources_equal(first, store(tmp_path / "c", copy, DTYPES["bfloat16"]))


def test_other_shapes_are_not_equal(tmp_path: Path) -> None:
    first, second = stored(tmp_path / "a", np.zeros(4)), stored(tmp_path / "b", np.zeros((2, 2)))
    assert not sources_equal(first, second)
    with pytest.raises(InconsistentCheckpointError) as caught:
        check_equal_sources([pair(first, second)])
    assert "shape [2, 2]" in str(caught.value)


def test_tensors_without_elements_are_equal() -> None:
    empty = TensorSource((0, 3), DTYPES["float32"], ())
    assert sources_equal(empty, empty)


def test_a_changed_source_is_noticed(tmp_path: Path) -> None:
    first, second = stored(tmp_path / "a", np.zeros(4)), stored(tmp_path / "b", np.zeros(4))
    (tmp_path / "b").write_bytes(b"xyz" + bytes(33))
    with pytest.raises(SourceChangedError):
        sources_equal(first, second)
