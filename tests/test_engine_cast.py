"""The engine casts exactly as torch does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cast_values import SOURCES, TARGETS, stressful_values
from ckptflow.dtypes import DTYPES, numpy_dtype
from ckptflow.engine import EngineOptions, write_weight_file
from ckptflow.errors import UsageError
from engine_sources import planned, read_output, store, weight_file

torch = pytest.importorskip("torch")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_torch(values: np.ndarray, name: str) -> torch.Tensor:
    bits = torch.from_numpy(values.copy().view(f"i{values.itemsize}" if values.itemsize > 1 else "u1"))
    return bits.view(getattr(torch, name))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_cast_gives_the_bits_that_torch_gives(tmp_path: Path, source: str, target: str) -> None:
    values = stressful_values(source)
    file = weight_file(planned("w", store(tmp_path / "in", values, DTYPES[source]), target))
    write_weight_file(file, tmp_path / "out", EngineOptions(allow_nonfinite=True))
    ours = read_output(tmp_path / "out")["w"]
    theirs = as_torch(values, source).to(getattr(torch, target))
    their_bits = theirs.view(_BITS[theirs.element_size()]).numpy()
    numbers = ~torch.isnan(theirs).numpy() if source != target else np.ones(values.shape, bool)
    assert numbers.sum() > values.size // 2
    np.testing.assert_array_equal(ours.view(their_bits.dtype)[numbers], their_bits[numbers])
    assert np.isnan(ours[~numbers].astype(np.float64)).all()


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_every_nan_that_a_cast_writes_is_the_same_nan(tmp_path: Path, target: str) -> None:
    payloads = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF, 0x7FABCDEF], np.uint32).view(np.float32)
    file = weight_file(planned("w", store(tmp_path / "in", np.tile(payloads, 40), DTYPES["float32"]), target))
    write_weight_file(file, tmp_path / "out", EngineOptions(allow_nonfinite=True))
    assert len(set(read_output(tmp_path / "out")["w"].view(np.uint16).tolist())) == 1


def test_an_uncast_tensor_keeps_its_nan_payloads(tmp_path: Path) -> None:
    payloads = np.array([0x7F800001, 0xFF800001, 0x3F800000], np.uint32).view(np.float32)
    file = weight_file(planned("w", store(tmp_path / "in", payloads, DTYPES["float32"])))
    write_weight_file(file, tmp_path / "out", EngineOptions(allow_nonfinite=True))
    assert read_output(tmp_path / "out")["w"].tobytes() == payloads.tobytes()


@pytest.mark.parametrize(
    ("source", "target"),
    [("int64", "bfloat16"), ("float32", "int32"), ("float32", "float8_e4m3fn"), ("bool", "float32")],
)
def test_what_is_not_a_cast_between_floats_is_refused(tmp_path: Path, source: str, target: str) -> None:
    values = np.zeros(4, numpy_dtype(DTYPES[source]))
    file = weight_file(planned("w", store(tmp_path / "in", values, DTYPES[source]), target))
    with pytest.raises(UsageError, match="only floats are cast"):
        write_weight_file(file, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
