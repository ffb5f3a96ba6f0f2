"""A device casts to the same bytes as the CPU, whatever the values, the layout and the buffers; or it is refused.

The code that drives a GPU runs here on torch's CPU device, with a queue that does nothing before it is waited for: a
buffer that is reused or looked at too early gives wrong bytes, as it would on a GPU. Tests marked ``gpu`` then run the
same on CUDA.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptflow.cli.main import main
from ckptflow.conversion import plan_conversion
from ckptflow.dtypes import DTYPES, numpy_dtype
from ckptflow.engine import EngineOptions, execute, write_weight_file
from ckptflow.engine import gather as gather_module
from ckptflow.engine.cuda import CudaQueue, idle_gpus, visible_gpus
from ckptflow.engine.device import AUTO_LEAST_CAST_BYTES, auto_considers_gpu, open_casters
from ckptflow.engine.device_check import check_device
from ckptflow.engine.gather import Gatherer
from ckptflow.engine.options import DISK_BLOCK_BYTES, Buffers, cast_bytes, plan_buffers
from ckptflow.engine.pipeline import Casters, NumpyCasters
from ckptflow.engine.record import TensorRecord
from ckptflow.engine.slots import free_gpu, lock_path
from ckptflow.engine.sources import SourceFiles
from ckptflow.engine.torch_cast import PINNED_PER_SCRATCH, AtOnce, Queue, TorchCasters, is_cast_on_device
from ckptflow.engine.windows import PieceIndex
from ckptflow.errors import DeviceError, OutputError, ValueRefusedError
from ckptflow.plan import WeightFile
from ckptflow.request import ConvertRequest
from ckptflow.tensors import concatenate
from engine_sources import base_of, planned, random_fold, read_output, same_bits, store, store_all, weight_file
from test_engine_cast import SOURCES, TARGETS, stressful_values
from test_engine_windows import stored_tensors, write_pieces

torch = pytest.importorskip("torch")

NO_GPU = not torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(NO_GPU, reason=f"torch {torch.__version__} sees no CUDA device here")]
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
only_without_gpu = pytest.mark.skipif(not NO_GPU, reason="there is a GPU here")


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


Written = tuple[bytes, tuple[TensorRecord, ...]]


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


def write(file: WeightFile, path: Path, **options: object) -> Written:
    record = write_weight_file(file, path, EngineOptions(durable=False, **options))  # type: ignore[arg-type]
    return path.read_bytes(), record.tensors


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


# --device auto


def test_auto_wants_a_large_job_a_device_and_something_to_cast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    dev = tmp_path / "dev"
    dev.mkdir()
    cast = store_all(tmp_path, {"w": np.ones((8, 6), np.float32)}, "float32", "bfloat16")
    copied = store_all(tmp_path, {"w": np.ones((8, 6), np.float32)}, "float32")
    large = EngineOptions(cast_bytes=AUTO_LEAST_CAST_BYTES)
    assert not auto_considers_gpu(large, cast, dev)
    (dev / "nvidiactl").touch()
    assert not auto_considers_gpu(large, cast, dev)
    (dev / "nvidia3").touch()
    assert auto_considers_gpu(large, cast, dev)
    assert not auto_considers_gpu(EngineOptions(cast_bytes=AUTO_LEAST_CAST_BYTES - 1), cast, dev)
    assert not auto_considers_gpu(EngineOptions(), cast, dev)
    assert not auto_considers_gpu(large, copied, dev)
    fold = random_fold(tmp_path, 8, 6, dora=False, transposed=False)
    folded = weight_file(planned("w", base_of(tmp_path, 8, 6)[1], "bfloat16", fold=fold), *cast.tensors)
    assert not auto_considers_gpu(large, folded, dev)
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not auto_considers_gpu(large, cast, dev)


def test_what_a_device_can_take_over_is_counted_in_bytes_of_the_source(tmp_path: Path) -> None:
    cast = store_all(tmp_path, {"a": np.ones(10, np.float32), "b": np.ones(5, np.float32)}, "float32", "bfloat16")
    copied = store_all(tmp_path, {"c": np.ones(7, np.float32)}, "float32")
    fold = random_fold(tmp_path, 8, 6, dora=False, transposed=False)
    folded = planned("w", base_of(tmp_path, 8, 6)[1], "bfloat16", fold=fold)
    assert cast_bytes([*cast.tensors, *copied.tensors, folded]) == 60


def test_auto_is_told_how_much_the_whole_conversion_casts(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "model").mkdir()
    tensors = {name: np.ones((64, 64), np.float32) for name in ("a", "b", "c")}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    request = ConvertRequest(path=tmp_path / "model", out=tmp_path / "out", max_shard_bytes=2 * 64 * 64)
    conversion = plan_conversion(request)
    assert len(conversion.plan.files) == 3
    assert conversion.engine_options.cast_bytes == 3 * 4 * 64 * 64


CONVERT_WITHOUT_TORCH = """
import sys
import numpy as np
from pathlib import Path
from ckptflow.dtypes import DTYPES
from ckptflow.engine import EngineOptions, write_weight_file
from engine_sources import store_all
directory = Path(sys.argv[1])
file = store_all(directory, {"w": np.ones(100_000, np.float32)}, "float32", "bfloat16")
write_weight_file(file, directory / "out", EngineOptions(device=sys.argv[2], cast_bytes=int(sys.argv[3])))
print("torch" in sys.modules)
"""


def python(program: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("device", "job_bytes", "hidden"), [("cpu", 10**12, False), ("auto", 10**9, False), ("auto", 10**12, True)]
)
def test_the_cpu_casts_without_torch(tmp_path: Path, device: str, job_bytes: int, hidden: bool) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": ""} if hidden else {}
    output, errors = python(CONVERT_WITHOUT_TORCH, tmp_path, device, job_bytes, **environment).communicate()
    assert (output.strip(), errors) == ("False", "")


SMI = """#!/bin/sh
cat <<'END'
GPU-11111111-2222-3333-4444-555555555555, 4
GPU-AAAAAAAA-2222-3333-4444-555555555555, 1907
GPU-bbbbbbbb-2222-3333-4444-555555555555, 1908
GPU-cccccccc-2222-3333-4444-555555555555, [N/A]
END
exit $STATUS
"""


def test_a_gpu_with_little_memory_in_use_is_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STATUS", "0")
    assert idle_gpus() == {"11111111-2222-3333-4444-555555555555", "aaaaaaaa-2222-3333-4444-555555555555"}
    monkeypatch.setenv("STATUS", "9")  # it can't talk to the driver
    assert idle_gpus() == set()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert idle_gpus() == set()


@only_without_gpu
def test_auto_goes_on_where_torch_sees_no_gpu_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ckptflow.engine.device.auto_considers_gpu", lambda *_: True)
    monkeypatch.setattr("ckptflow.engine.device.idle_gpus", lambda: {"11111111-2222-3333-4444-555555555555"})
    file = store_all(tmp_path, {"w": np.ones(100, np.float32)}, "float32", "bfloat16")
    with caplog.at_level("INFO"), open_casters(EngineOptions(), file, lambda: None) as (casters, _):
        assert isinstance(casters, NumpyCasters)
    assert "cast on the CPU, since there is no CUDA device" in caplog.text


# --device cuda


@only_without_gpu
def test_cuda_without_a_gpu_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "model").mkdir()
    save_file({"w": np.ones((4, 4), np.float32)}, tmp_path / "model" / "model.safetensors")
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "out"), "--device", "cuda"]) == 1
    message = capsys.readouterr().err
    assert "there is no CUDA device" in message
    assert "--device cpu" in message
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_cuda_without_torch_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DeviceError, match="needs torch") as caught:
        visible_gpus()
    assert "--device cpu" in str(caught.value)


# One process at a time for each GPU


HOLD_A_GPU = """
import sys, time
from ckptflow.engine.slots import free_gpu
with free_gpu(sys.argv[1:], lambda: None) as number:
    print(number, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def gpu_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CKPTFLOW_GPU_LOCKS", str(tmp_path))
    return tmp_path


@contextmanager
def holder(*gpus: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that holds a GPU, and which."""
    process = python(HOLD_A_GPU, *gpus)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def held(gpus: Sequence[str], on_wait: Callable[[], None] | None = None) -> int | None:
    with free_gpu(gpus, on_wait) as number:
        return number


@pytest.mark.usefixtures("gpu_locks")
def test_each_process_gets_a_gpu_of_its_own_until_all_are_taken() -> None:
    with holder("GPU-a", "GPU-b") as (_, first), holder("GPU-a", "GPU-b") as (_, second):
        assert (first, second) == (0, 1)
        assert held(["GPU-a", "GPU-b"]) is None
        assert held(["GPU-a", "GPU-b", "GPU-c"]) == 2
        with free_gpu(["GPU-c"], None) as mine:
            assert mine == 0
            assert held(["GPU-c"]) is None  # another thread of this process has to wait as well


@pytest.mark.usefixtures("gpu_locks")
def test_a_killed_process_gives_its_gpu_back_to_one_that_waits() -> None:
    waits = []
    with holder("GPU-a") as (process, _):

        def kill_it() -> None:
            waits.append(None)
            if len(waits) == 2:
                process.kill()  # -9

        assert held(["GPU-a"], kill_it) == 0
    assert process.returncode == -9
    assert len(waits) >= 2


@pytest.mark.usefixtures("gpu_locks")
def test_a_file_that_is_cancelled_stops_waiting_for_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ckptflow.engine.device.visible_gpus", lambda: ["GPU-a"])
    file = store_all(tmp_path, {"w": np.ones(100, np.float32)}, "float32", "bfloat16")

    class AtTheThirdLook:
        looks = 0

        def is_set(self) -> bool:
            self.looks += 1
            return self.looks == 3

    with holder("GPU-a"), pytest.raises(OutputError, match="cancelled"):
        write_weight_file(file, tmp_path / "out", EngineOptions(device="cuda"), cancel=AtTheThirdLook())
    assert caplog.text.count("waits for a GPU") == 1
    assert not (tmp_path / "out").exists()
    assert held(["GPU-a"]) == 0


def test_the_lock_of_a_gpu_can_be_taken_by_other_users_and_is_nobodys_link(gpu_locks: Path) -> None:
    before = os.umask(0o077)
    try:
        assert held(["GPU-a"]) == 0
    finally:
        os.umask(before)
    assert lock_path("GPU-a").stat().st_mode & 0o777 == 0o644
    target = gpu_locks / "something"
    lock_path("GPU-b/../x").symlink_to(target)
    with pytest.raises(DeviceError, match="lock of a GPU"):
        held(["GPU-b/../x"])
    assert not target.exists()


# Only with a GPU: CUDA itself


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="needs a CUDA device")
class TestCuda:
    def test_buffers_are_pinned_and_the_gpu_casts(self, tmp_path: Path) -> None:
        file = store_all(tmp_path, {"w": np.ones(3_000_000, np.float32)}, "float32", "bfloat16")
        with open_casters(EngineOptions(device="cuda"), file, lambda: None) as (casters, buffers):
            assert isinstance(casters, TorchCasters)
            block = torch.frombuffer(casters.page_buffer(buffers.block_bytes), dtype=torch.uint8)
            scratch = torch.frombuffer(casters.any_caster().buffer(), dtype=torch.uint8)
            assert block.is_pinned()
            assert scratch.is_pinned()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the profiler's own
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                write(file, tmp_path / "out", device="cuda")
            launched = [event.key for event in profile.key_averages()]
        assert any("HtoD (Pinned -> Device)" in key for key in launched)
        assert any("DtoH (Device -> Pinned)" in key for key in launched)
        assert not any("Pageable" in key for key in launched)

    @settings(max_examples=60, deadline=None)
    @given(stored=stored_tensors(), scratch=st.integers(2, 40), gap=st.integers(0, 20))
    def test_any_tiling_is_cast_right(self, stored, scratch: int, gap: int) -> None:  # type: ignore[no-untyped-def]
        values, pieces = stored
        buffers = Buffers(threads=1, ring=3, block_bytes=4096, scratch_bytes=4 * scratch)
        with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch, SourceFiles() as files:
            patch.setattr(gather_module, "_BRIDGED_GAP_BYTES", gap)
            source = write_pieces(Path(name), values, pieces)
            device = torch.device("cuda", 0)
            with TorchCasters(device, buffers, lambda: CudaQueue(device), least_bytes=0) as casters:
                out = np.zeros(values.size, numpy_dtype(DTYPES["bfloat16"]))
                gatherer = Gatherer(files, 4 * scratch, threading.Event(), casters.caster())
                gatherer.fill(out, source, PieceIndex(source), 0, DTYPES["bfloat16"])
        assert same_bits(out, values.reshape(-1).astype(out.dtype))

    def test_a_full_gpu_is_refused_with_what_to_do_and_auto_takes_the_cpu(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ckptflow.engine.device.auto_considers_gpu", lambda *_: True)
        file = store_all(tmp_path, {"w": np.ones(3_000_000, np.float32)}, "float32", "bfloat16")
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1e-6)
        try:
            with pytest.raises(DeviceError, match="memory is full") as caught:
                write(file, tmp_path / "out", device="cuda")
            full = write(file, tmp_path / "out")
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert "--device cpu" in str(caught.value)
        assert full == write(file, tmp_path / "out", device="cpu")

    def test_a_gpu_that_another_process_holds_is_left_to_it_by_auto(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_locks: Path
    ) -> None:
        monkeypatch.setattr("ckptflow.engine.device.auto_considers_gpu", lambda *_: True)
        file = store_all(tmp_path, {"w": np.ones(300_000, np.float32)}, "float32", "bfloat16")
        with ExitStack() as stack:
            for name in visible_gpus():
                stack.enter_context(holder(name))
            with open_casters(EngineOptions(), file, lambda: None) as (casters, _):
                assert isinstance(casters, NumpyCasters)
        with open_casters(EngineOptions(), file, lambda: None) as (casters, _):
            assert isinstance(casters, TorchCasters)

    def test_nvidia_smi_and_torch_name_the_gpus_alike(self) -> None:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
        assert all(uuid in listed for uuid in visible_gpus())

    def test_a_gpu_in_use_is_left_alone_by_auto(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ckptflow.engine.device.auto_considers_gpu", lambda *_: True)
        file = store_all(tmp_path, {"w": np.ones(300_000, np.float32)}, "float32", "bfloat16")
        used = [torch.empty(3 * 10**9, dtype=torch.uint8, device=n) for n in range(torch.cuda.device_count())]
        with open_casters(EngineOptions(), file, lambda: None) as (casters, _):
            assert isinstance(casters, NumpyCasters)
        del used
        torch.cuda.empty_cache()
