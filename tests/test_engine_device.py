"""A device casts to the same bytes as the CPU, whatever the values, the layout and the buffers; or it is refused.

The code that drives a GPU runs here on torch's CPU device, with a queue that does nothing before it is waited for: a
buffer that is reused or looked at too early gives wrong bytes, as it would on a GPU. Tests marked ``gpu`` then run the
same on CUDA.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cast_values import SOURCES, TARGETS, stressful_values
from ckptflow.dtypes import DTYPES, numpy_dtype
from ckptflow.engine import EngineOptions, execute
from ckptflow.engine import gather as gather_module
from ckptflow.engine.device_check import check_device
from ckptflow.engine.gather import Gatherer
from ckptflow.engine.options import DISK_BLOCK_BYTES, Buffers, plan_buffers
from ckptflow.engine.pipeline import Casters
from ckptflow.engine.sources import SourceFiles
from ckptflow.engine.torch_cast import PINNED_PER_SCRATCH, AtOnce, Queue, TorchCasters, is_cast_on_device
from ckptflow.engine.windows import PieceIndex
from ckptflow.errors import DeviceError, ValueRefusedError
from ckptflow.plan import WeightFile
from ckptflow.tensors import concatenate
from engine_sources import Written, planned, read_output, same_bits, store, store_all, weight_file, write
from engine_tilings import stored_tensors, write_pieces
from gpu_marks import on_each_device

torch = pytest.importorskip("torch")


class Late:
    """A queue as slow as can be: it works when it is waited for, and not before."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None]) -> None:
        self._waiting.append(work)

    def wait(self) -> None:
        while self._waiting:
            self._waiting.pop(0)()


class Forgetful:
    """A queue that loses every third piece of work."""

    def __init__(self) -> None:
        self._count = 0

    def submit(self, work: Callable[[], None]) -> None:
        self._count += 1
        if self._count % 3:
            work()

    def wait(self) -> None:
        pass


class Failing(AtOnce):
    """A device that breaks when results are asked for."""

    def __init__(self) -> None:
        self._begun = False

    def submit(self, work: Callable[[], None]) -> None:
        self._begun = True

    def wait(self) -> None:
        if self._begun:
            self._begun = False
            raise DeviceError("the GPU failed")


@contextmanager
def as_device(patch: pytest.MonkeyPatch, queue: Callable[[], Queue] = Late) -> Iterator[list[TorchCasters]]:
    """Let the engine cast through torch on the CPU."""
    opened = []

    @contextmanager
    def open_late(options: EngineOptions, file: WeightFile, _: object) -> Iterator[tuple[Casters, Buffers]]:
        buffers = plan_buffers(options, file, PINNED_PER_SCRATCH)
        with TorchCasters(torch.device("cpu"), buffers, queue, least_bytes=0) as casters:
            opened.append(casters)
            yield casters, buffers

    with patch.context() as here:
        here.setattr(execute, "open_casters", open_late)
        yield opened


def write_both(
    patch: pytest.MonkeyPatch, device: str, file: WeightFile, directory: Path, **options: object
) -> tuple[Written, Written]:
    """What the CPU writes, and what the device writes: bytes of the file, and records of its tensors."""
    ours = write(file, directory / "by-cpu", device="cpu", **options)
    if device == "cuda":
        return ours, write(file, directory / "by-device", device="cuda", **options)
    with as_device(patch) as opened:
        theirs = write(file, directory / "by-device", **options)
    assert len(opened) == 1
    return ours, theirs


@on_each_device
@pytest.mark.parametrize("source", SOURCES)
def test_all_values_and_statistics_are_those_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, device: str
) -> None:
    values = stressful_values(source)
    stored = store(tmp_path / "in", np.resize(values, max(values.size, 1 << 17)), DTYPES[source])
    file = weight_file(*(planned(target, stored, target) for target in TARGETS))
    ours, theirs = write_both(monkeypatch, device, file, tmp_path, allow_nonfinite=True)
    assert ours == theirs
    assert any(record.nonfinite for record in ours[1])


def test_the_pairs_that_a_conversion_asks_for_most_are_cast_on_the_device() -> None:
    pairs = {(s, t) for s in SOURCES for t in TARGETS if is_cast_on_device(DTYPES[s], DTYPES[t])}
    assert pairs >= {(s, t) for s in ("float32", "float16", "bfloat16") for t in ("float32", "float16", "bfloat16")}
    assert not any("float64" in pair or "float8_e8m0fnu" in pair for pair in pairs)


@on_each_device
@pytest.mark.parametrize(
    ("budget", "threads"), [(300_000, 1), (900_000, 2), (2_500_000, 3), (20_000_000, 8), (512_000_000, 4)]
)
def test_buffers_of_any_size_give_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int, threads: int, device: str
) -> None:
    rng = np.random.default_rng(3)
    arrays = {f"layer.{n}": rng.standard_normal(size, np.float32) for n, size in enumerate((700_001, 3, 333_333, 1))}
    ranks = [
        store(tmp_path / f"rank{n}", rng.standard_normal((512, 301 + n), np.float32), DTYPES["float32"]) for n in (0, 1)
    ]
    cut_along_dim_1 = planned("o_proj", concatenate(ranks, 1), "bfloat16")
    tensors = store_all(tmp_path, arrays, "float32", "bfloat16").tensors
    file = weight_file(*tensors, cut_along_dim_1, planned("ids", store(tmp_path / "i", np.arange(9), DTYPES["int64"])))
    ours, theirs = write_both(monkeypatch, device, file, tmp_path, memory_budget_bytes=budget, threads=threads)
    assert ours == theirs
    assert same_bits(
        read_output(tmp_path / "by-device")["layer.2"], arrays["layer.2"].astype(numpy_dtype(DTYPES["bfloat16"]))
    )


@settings(max_examples=150, deadline=None)
@given(stored=stored_tensors(), scratch=st.integers(2, 40), gap=st.integers(0, 20), data=st.data())
def test_any_range_of_any_tiling_is_cast_right(stored, scratch: int, gap: int, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    values, pieces = stored
    start = data.draw(st.integers(0, values.size - 1))
    stop = data.draw(st.integers(start + 1, values.size))
    buffers = Buffers(threads=1, ring=3, block_bytes=4096, scratch_bytes=4 * scratch)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch, SourceFiles() as files:
        patch.setattr(gather_module, "_BRIDGED_GAP_BYTES", gap)
        source = write_pieces(Path(name), values, pieces)
        with TorchCasters(torch.device("cpu"), buffers, Late, least_bytes=0) as casters:
            gatherer = Gatherer(files, 4 * scratch, threading.Event(), casters.caster())
            for target in ("bfloat16", "float16", "float64"):
                out = np.zeros(stop - start, numpy_dtype(DTYPES[target]))
                gatherer.fill(out, source, PieceIndex(source), start, DTYPES[target])
                assert same_bits(out, values.reshape(-1)[start:stop].astype(out.dtype))


@on_each_device
@pytest.mark.parametrize(("bad", "target"), [(np.nan, "bfloat16"), (-np.inf, "float16"), (65520.0, "float16")])
def test_what_must_not_be_published_is_refused_in_the_same_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: float, target: str, device: str
) -> None:
    values = np.ones((700, 900), np.float32)
    values[613, 20] = values[650, 1] = bad
    file = store_all(tmp_path, {"fine": np.ones(9, np.float32), "bad.weight": values}, "float32", target)
    with pytest.raises(ValueRefusedError, match=r"index \[613, 20\]") as on_cpu:
        write(file, tmp_path / "out", device="cpu")
    with as_device(monkeypatch) if device == "cpu" else nullcontext(), pytest.raises(ValueRefusedError) as on_device:
        write(file, tmp_path / "out", device="auto" if device == "cpu" else "cuda")
    assert str(on_device.value) == str(on_cpu.value)


def test_memory_for_blocks_begins_at_a_page_and_holds_zeros() -> None:
    buffers = Buffers(threads=1, ring=9, block_bytes=3 * DISK_BLOCK_BYTES, scratch_bytes=4096)
    with TorchCasters(torch.device("cpu"), buffers) as casters:
        for _ in range(buffers.ring):
            memory = casters.page_buffer(buffers.block_bytes)
            assert np.frombuffer(memory, "u1").ctypes.data % DISK_BLOCK_BYTES == 0
            assert bytes(memory) == bytes(buffers.block_bytes)
            memory[:] = b"\xff" * len(memory)  # no two share memory


def test_a_devices_buffers_stay_inside_the_memory_budget(tmp_path: Path) -> None:
    file = store_all(tmp_path, {"w": np.ones(3, np.float32)}, "float32", "bfloat16")
    for budget in (500_000, 1_000_000, 10_000_000, 512_000_000):
        buffers = plan_buffers(EngineOptions(threads=4, memory_budget_bytes=budget), file, PINNED_PER_SCRATCH)
        pinned = PINNED_PER_SCRATCH * buffers.threads * buffers.scratch_bytes
        assert buffers.ring * buffers.block_bytes + pinned <= budget


@pytest.mark.parametrize("scratch_bytes", [64 << 10, 1 << 20])
def test_a_device_that_casts_as_the_cpu_does_is_taken(scratch_bytes: int) -> None:
    pairs = [(DTYPES[s], DTYPES[t]) for s in SOURCES for t in SOURCES[:4]]
    buffers = Buffers(threads=1, ring=3, block_bytes=4096, scratch_bytes=scratch_bytes)
    submitted: list[None] = []

    class Counting(Late):
        def submit(self, work: Callable[[], None]) -> None:
            submitted.append(None)
            super().submit(work)

    with TorchCasters(torch.device("cpu"), buffers, Counting) as casters:
        name = f"torch on the CPU, {scratch_bytes}"
        check_device(casters.any_caster(), name, pairs)
        once = len(submitted)
        assert once >= sum(is_cast_on_device(s, t) and s != t for s, t in pairs)
        check_device(casters.any_caster(), name, pairs)
    assert len(submitted) == once  # a device is looked at once a process


@pytest.mark.parametrize("source", ["float32", "bfloat16"])
def test_a_device_that_casts_otherwise_is_refused_before_it_is_used(source: str) -> None:
    buffers = Buffers(threads=1, ring=3, block_bytes=4096, scratch_bytes=16 << 10)
    with TorchCasters(torch.device("cpu"), buffers, Forgetful, least_bytes=0) as casters:
        for _ in range(2):  # a device that failed is not taken for good the second time
            with pytest.raises(DeviceError, match=f"does not cast {source} to float16 as the CPU does"):
                check_device(casters.any_caster(), "a bad one", [(DTYPES[source], DTYPES["float16"])])


def test_a_device_that_fails_in_the_middle_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = store_all(tmp_path, {"w": np.ones(3_000_000, np.float32)}, "float32", "bfloat16")
    with as_device(monkeypatch, Failing), pytest.raises(DeviceError, match="the GPU failed"):
        write(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["0.raw"]
