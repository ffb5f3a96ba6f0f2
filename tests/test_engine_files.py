"""A weight file is a pure function of its plan: header, bytes, hashes, statistics, whatever threads and buffers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckptflow.dtypes import DTYPES, numpy_dtype
from ckptflow.engine import EngineOptions, WeightFileRecord, write_weight_file
from ckptflow.engine.options import plan_buffers
from ckptflow.engine.scan import ValueRange, scan
from ckptflow.errors import UnsupportedCheckpointError, UsageError
from ckptflow.output.safetensors import weight_file_header
from ckptflow.plan import WeightFile
from ckptflow.tensors import SourceFile, TensorSource, concatenate, permute, whole
from engine_sources import planned, read_output, same_bits, store, store_all, weight_file

OPTIONS = [
    EngineOptions(threads=1),
    EngineOptions(threads=2, direct_io=False),
    EngineOptions(threads=4, memory_budget_bytes=1_000_000),
    EngineOptions(threads=3, memory_budget_bytes=300_000, durable=False),
]


def mixed_file(directory: Path) -> WeightFile:
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((900, 1111), np.float32)
    shards = [
        store(directory / f"s{n}", part, DTYPES["float32"]) for n, part in enumerate(np.array_split(matrix, 3, 1))
    ]
    return weight_file(
        planned("down", concatenate(shards, 1), "bfloat16"),
        planned("turned", permute(store(directory / "t", matrix, DTYPES["float32"]), (1, 0)), "float16"),
        planned("kept", store(directory / "k", rng.standard_normal(77_777), DTYPES["float64"])),
        planned("ids", store(directory / "i", rng.integers(-9, 9, (3, 5)), DTYPES["int64"])),
        planned("mask", store(directory / "m", rng.integers(0, 2, 1001).astype(bool), DTYPES["bool"])),
        planned("scalar", store(directory / "c", np.array(2.5, np.float32), DTYPES["float32"]), "bfloat16"),
        planned("empty", TensorSource((0, 4), DTYPES["float32"], ()), "bfloat16"),
        planned("bytes", store(directory / "b", rng.integers(0, 99, 5).astype(np.uint8), DTYPES["uint8"])),
    )


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: f"{o.threads}-threads")
def test_the_bytes_do_not_depend_on_threads_buffers_or_write_path(tmp_path: Path, options: EngineOptions) -> None:
    file = mixed_file(tmp_path)
    first = write_weight_file(file, tmp_path / "first")
    again = write_weight_file(file, tmp_path / "again", options)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "first").read_bytes()
    assert (again.sha256, again.tensors, again.nbytes) == (first.sha256, first.tensors, first.nbytes)


def test_the_record_says_what_is_in_the_file(tmp_path: Path) -> None:
    file = mixed_file(tmp_path)
    record = write_weight_file(file, tmp_path / "out")
    data = (tmp_path / "out").read_bytes()
    assert (record.name, record.nbytes) == ("model.safetensors", len(data))
    assert record.sha256 == hashlib.sha256(data).hexdigest()
    assert [t.fqn for t in record.tensors] == [t.fqn for t in file.tensors]
    found = read_output(tmp_path / "out")
    for tensor in record.tensors:
        written = data[tensor.offset_bytes : tensor.offset_bytes + tensor.nbytes]
        assert written == found[tensor.fqn].tobytes()
        assert tensor.checksum == f"xxh3_128:{xxhash.xxh3_128_hexdigest(written)}"
        values = found[tensor.fqn].astype(np.float64)
        assert (tensor.shape, tensor.dtype) == (
            values.shape,
            next(t.dtype for t in file.tensors if t.fqn == tensor.fqn),
        )
        if values.size:
            assert (tensor.minimum, tensor.maximum) == (values.min(), values.max())
        assert tensor.all_zero is (values.size > 0 and not values.any())
        assert tensor.nonfinite == 0


def test_the_safetensors_library_reads_every_tensor_as_planned(tmp_path: Path) -> None:
    file = mixed_file(tmp_path)
    write_weight_file(file, tmp_path / "out")
    found = read_output(tmp_path / "out")
    assert {t.fqn: t.shape for t in file.tensors} == {fqn: values.shape for fqn, values in found.items()}
    matrix = np.random.default_rng(1).standard_normal((900, 1111), np.float32)
    assert same_bits(found["down"], matrix.astype(numpy_dtype(DTYPES["bfloat16"])))
    assert same_bits(found["turned"], matrix.T.astype(np.float16))


def test_the_tensors_begin_at_a_whole_disk_block(tmp_path: Path) -> None:
    header = weight_file_header(mixed_file(tmp_path))
    assert len(header) % 4096 == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert json.loads(header[8:])["__metadata__"] == {"format": "pt"}


def test_every_dtype_that_safetensors_knows_is_copied_bit_for_bit(tmp_path: Path) -> None:
    arrays = {}
    for dtype in DTYPES.values():
        if dtype.code is not None:
            bits = np.arange(3 * dtype.itemsize, dtype=np.uint8) % (2 if dtype.kind == "bool" else 99)
            arrays[dtype.name] = bits.view(numpy_dtype(dtype))
    file = weight_file(*(planned(n, store(tmp_path / n, a, DTYPES[n])) for n, a in arrays.items()))
    record = write_weight_file(file, tmp_path / "out")
    data = (tmp_path / "out").read_bytes()
    assert len(record.tensors) == 17
    for tensor in record.tensors:
        assert data[tensor.offset_bytes : tensor.offset_bytes + tensor.nbytes] == arrays[tensor.fqn].tobytes()


def test_a_file_without_elements_is_a_header_alone(tmp_path: Path) -> None:
    file = weight_file(planned("none", TensorSource((0,), DTYPES["float32"], ())))
    record = write_weight_file(file, tmp_path / "out")
    assert read_output(tmp_path / "out")["none"].shape == (0,)
    assert record.tensors[0].minimum is None
    assert record.nbytes == (tmp_path / "out").stat().st_size == 4096


def test_thousands_of_tiny_tensors_cost_one_read_each(tmp_path: Path) -> None:
    values = np.arange(3000 * 4, dtype=np.float32).reshape(3000, 4)
    (tmp_path / "in").write_bytes(values.tobytes())
    status = (tmp_path / "in").stat()
    source = SourceFile(str(tmp_path / "in"), status.st_size, status.st_mtime_ns)
    tensors = [planned(f"t{n}", whole(source, 16 * n, (2, 2), DTYPES["float32"])) for n in range(3000)]
    record = write_weight_file(weight_file(*tensors), tmp_path / "out")
    assert record.read_bytes == values.nbytes
    found = read_output(tmp_path / "out")
    assert all(found[f"t{n}"].tobytes() == values[n].tobytes() for n in range(3000))


def test_progress_adds_up_to_the_bytes_of_the_tensors(tmp_path: Path) -> None:
    steps: list[int] = []
    options = EngineOptions(memory_budget_bytes=400_000)
    record = write_weight_file(mixed_file(tmp_path), tmp_path / "out", options, steps.append)
    assert sum(steps) == sum(tensor.nbytes for tensor in record.tensors)
    assert len(steps) > 20


def test_an_existing_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"old" * 9999)
    write_weight_file(store_all(tmp_path, {"w": np.ones(3, np.float32)}, "float32"), tmp_path / "out")
    assert read_output(tmp_path / "out")["w"].tolist() == [1, 1, 1]


def test_a_record_survives_json(tmp_path: Path) -> None:
    arrays = {"w": np.array([np.nan, np.inf, -2.5], np.float32), "n": np.full(2, np.nan, np.float32)}
    file = store_all(tmp_path, arrays, "float32", "bfloat16")
    record = write_weight_file(file, tmp_path / "out", EngineOptions(allow_nonfinite=True))
    text = json.dumps(record.to_json(), allow_nan=False)
    assert WeightFileRecord.from_json(json.loads(text)) == record
    by_name = {t.fqn: t for t in record.tensors}
    assert (by_name["w"].minimum, by_name["w"].maximum, by_name["w"].nonfinite) == (-2.5, -2.5, 2)
    assert (by_name["n"].minimum, by_name["n"].maximum, by_name["n"].nonfinite) == (None, None, 2)


@given(
    name=st.sampled_from(["float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"]),
    data=st.binary(min_size=8, max_size=64).map(lambda b: b[: len(b) // 8 * 8]),
)
def test_statistics_by_bits_are_those_of_the_values(name: str, data: bytes) -> None:
    values = np.frombuffer(bytearray(data), numpy_dtype(DTYPES[name]))
    with np.errstate(all="ignore"):
        wide = values.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    found = scan(values, DTYPES[name], canonical_nan=False)
    assert found.nonfinite == wide.size - finite.size
    assert (found.minimum, found.maximum) == ((finite.min(), finite.max()) if finite.size else (None, None))
    assert found.all_zero is bool((wide == 0).all())
    if found.nonfinite:
        assert found.first_nonfinite == int(np.argmin(np.isfinite(wide)))


def test_ranges_join_in_either_order() -> None:
    some, none, other = ValueRange(-1.0, 2.0), ValueRange(nonfinite=3, first_nonfinite=0), ValueRange(0.0, 5.0)
    assert some.joined(other).joined(none) == ValueRange(-1.0, 5.0, 3)
    assert none.joined(some) == ValueRange(-1.0, 2.0, 3, 0)


def test_buffers_stay_inside_the_memory_budget(tmp_path: Path) -> None:
    file = store_all(tmp_path, {"w": np.ones(3, np.float32)}, "float32")
    for budget in (300_000, 1_000_000, 10_000_000, 512_000_000):
        for threads in (1, 2, 16):
            buffers = plan_buffers(EngineOptions(threads=threads, memory_budget_bytes=budget), file)
            assert buffers.ring * buffers.block_bytes + buffers.threads * buffers.scratch_bytes <= budget
            assert buffers.block_bytes % 4096 == 0
            assert buffers.ring > buffers.threads


@pytest.mark.parametrize("bad", [{"threads": 0}, {"memory_budget_bytes": 10}])
def test_options_that_cannot_work_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        EngineOptions(**bad)  # type: ignore[arg-type]


def test_a_plan_that_misaligns_a_tensor_is_refused(tmp_path: Path) -> None:
    odd = planned("a", store(tmp_path / "a", np.zeros(3, np.uint8), DTYPES["uint8"]))
    wide = planned("b", store(tmp_path / "b", np.zeros(3, np.float32), DTYPES["float32"]))
    with pytest.raises(UsageError, match="not aligned"):
        write_weight_file(WeightFile(name="x", tensors=(odd, wide)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_headers_that_safetensors_cannot_hold_are_refused(tmp_path: Path) -> None:
    one = planned("w", store(tmp_path / "w", np.zeros(1, np.float32), DTYPES["float32"]))
    wide = planned("c", store(tmp_path / "c", np.zeros(1, np.complex128), DTYPES["complex128"]))
    with pytest.raises(UsageError, match="one name"):
        weight_file_header(weight_file(one, one))
    with pytest.raises(UsageError, match="one name"):
        weight_file_header(weight_file(planned("__metadata__", one.source)))
    with pytest.raises(UnsupportedCheckpointError, match="no such dtype"):
        weight_file_header(weight_file(wide))
    with pytest.raises(UnsupportedCheckpointError, match="Unicode"):
        weight_file_header(weight_file(planned("\ud800", one.source)))
