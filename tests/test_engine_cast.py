"""The engine casts exactly as torch does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckptflow.dtypes import DTYPES, numpy_dtype
from ckptflow.engine import EngineOptions, write_weight_file
from ckptflow.errors import UsageError
from engine_sources import planned, read_output, store, weight_file

torch = pytest.importorskip("torch")

TARGETS = ("float64", "float32", "float16", "bfloat16")
SOURCES = (*TARGETS, "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@np.errstate(all="ignore")
def stressful_values(name: str) -> np.ndarray:
    """Every bit pattern of the small types; random bits, ties, subnormals and edges of the large ones."""
    dtype = numpy_dtype(DTYPES[name])
    if dtype.itemsize <= 2:
        return np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype)
    rng = np.random.default_rng(5)
    random_bits = rng.integers(0, 2 ** (8 * dtype.itemsize), 100_000, f"u{dtype.itemsize}").view(dtype)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(dtype)
    brains = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).astype(dtype)
    steps = (0, 2**-11, 2**-9, 2**-8, -(2**-11), 2**-11 + 2**-23)
    near = [v * (1 + step) for v in (halves, brains) for step in steps]
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000).view(np.float32).astype(dtype)
    around = [np.nextafter(ties, dtype.type(s)) for s in (-np.inf, np.inf)]
    info = np.finfo(dtype)
    edges = [
        0.0,
        -0.0,
        65504,
        65519.99,
        65520,
        -65520,
        3.3895e38,
        3.39616e38,
        info.max,
        info.tiny,
        info.smallest_subnormal,
        2.0**-133,
        2.0**-134,
        2.0**-25,
        2.0**-24,
    ]
    return np.concatenate([random_bits, *near, ties, *around, np.array(edges, dtype)])


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
