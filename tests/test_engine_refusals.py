"""What must not be published is refused by name, and a run that fails leaves nothing behind."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckptflow.dtypes import DTYPES, numpy_dtype
from ckptflow.engine import EngineOptions, write_weight_file
from ckptflow.errors import OutputError, SourceChangedError, ValueRefusedError
from ckptflow.plan import WeightFile
from ckptflow.tensors import TensorSource, concatenate
from engine_sources import SourceWriter, piece, planned, store, store_all, weight_file

SMALL_BLOCKS = EngineOptions(threads=2, memory_budget_bytes=500_000)


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    """After each test: no part file, no output, no thread, no open descriptor more than before."""
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    assert not list(tmp_path.glob(".*.part"))
    assert not (tmp_path / "out").exists()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def big_file(directory: Path) -> WeightFile:
    return store_all(directory, {"w": np.ones(3_000_000, np.float32)}, "float32", "bfloat16")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
def test_nan_and_inf_are_refused_by_name_and_index(tmp_path: Path, bad: float, target: str) -> None:
    values = np.ones((1000, 700), np.float32)
    values[613, 20] = values[900, 1] = bad
    file = store_all(tmp_path, {"fine": np.ones(9, np.float32), "bad.weight": values}, "float32", target)
    with pytest.raises(ValueRefusedError, match="holds NaN or Inf") as caught:
        write_weight_file(file, tmp_path / "out", SMALL_BLOCKS)
    assert caught.value.tensor == "bad.weight"
    assert caught.value.file == str(tmp_path / "1.raw")
    assert caught.value.found == f"{bad} at index [613, 20]"
    assert "--allow-nonfinite" in str(caught.value)


@pytest.mark.parametrize(("value", "target"), [(65520.0, "float16"), (-1e9, "float16"), (3.3999e38, "bfloat16")])
def test_an_overflow_of_the_cast_is_told_from_an_inf_in_the_source(tmp_path: Path, value: float, target: str) -> None:
    values = np.ones(500_000, np.float32)
    values[400_001] = value
    file = store_all(tmp_path, {"w": values}, "float32", target)
    with pytest.raises(ValueRefusedError, match=f"overflows in the cast from float32 to {target}") as caught:
        write_weight_file(file, tmp_path / "out", SMALL_BLOCKS)
    assert caught.value.found == f"{float(np.float32(value))} at index [400001]"
    assert "--keep-dtype 'w'" in str(caught.value)


def test_the_largest_values_that_do_not_overflow_pass(tmp_path: Path) -> None:
    arrays = {"w": np.array([65519.99, -65504], np.float32)}
    record = write_weight_file(store_all(tmp_path, arrays, "float32", "float16"), tmp_path / "out")
    assert (record.tensors[0].minimum, record.tensors[0].maximum) == (-65504, 65504)
    (tmp_path / "out").unlink()


def test_nan_in_a_complex_or_float8_tensor_is_refused_too(tmp_path: Path) -> None:
    for name, values in {
        "complex64": np.array([1, complex(0, np.inf)], np.complex64),
        "float8_e4m3fn": np.array([1, 0x7F], np.uint8).view(numpy_dtype(DTYPES["float8_e4m3fn"])),
        "float8_e8m0fnu": np.array([1, 0xFF], np.uint8).view(numpy_dtype(DTYPES["float8_e8m0fnu"])),
    }.items():
        with pytest.raises(ValueRefusedError, match=r"holds NaN or Inf"):
            write_weight_file(weight_file(planned("w", store(tmp_path / "in", values, DTYPES[name]))), tmp_path / "out")


def test_the_file_named_is_the_one_that_holds_the_value(tmp_path: Path) -> None:
    parts = [np.ones((4, 3), np.float32) for _ in range(3)]
    parts[1][2, 0] = np.nan
    shards = [store(tmp_path / f"rank{n}", part, DTYPES["float32"]) for n, part in enumerate(parts)]
    with pytest.raises(ValueRefusedError) as caught:
        write_weight_file(weight_file(planned("w", concatenate(shards, 1))), tmp_path / "out")
    assert caught.value.file == str(tmp_path / "rank1")
    assert caught.value.found == "nan at index [2, 3]"


def test_a_source_that_is_shorter_than_described_is_refused(tmp_path: Path) -> None:
    file = big_file(tmp_path)
    os.truncate(tmp_path / "0.raw", 9_000_000)
    with pytest.raises(SourceChangedError, match="changed while it was read"):
        write_weight_file(file, tmp_path / "out")


@pytest.mark.parametrize("change", ["truncate", "touch", "replace", "remove"])
def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path, change: str) -> None:
    file, source = big_file(tmp_path), tmp_path / "0.raw"
    changes = {
        "truncate": lambda: os.truncate(source, 4096),
        "touch": lambda: os.utime(source, ns=(1, 1)),
        "replace": lambda: ((tmp_path / "new").write_bytes(b"other"), os.replace(tmp_path / "new", source)),
        "remove": source.unlink,
    }
    calls: list[int] = []

    def change_once(_: int) -> None:
        if not calls:
            changes[change]()
        calls.append(1)

    with pytest.raises(SourceChangedError) as caught:
        write_weight_file(file, tmp_path / "out", SMALL_BLOCKS, change_once)
    assert caught.value.file == str(source)


def test_a_piece_past_the_end_of_its_file_is_refused(tmp_path: Path) -> None:
    writer = SourceWriter(tmp_path / "in")
    at = writer.add(np.ones(5, np.float32))
    source = TensorSource((50,), DTYPES["float32"], (piece(writer.finish(), at, (0,), (50,)),))
    with pytest.raises(SourceChangedError, match="ends too early"):
        write_weight_file(weight_file(planned("w", source)), tmp_path / "out")


def test_an_exception_of_the_progress_callback_stops_the_run(tmp_path: Path) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_weight_file(big_file(tmp_path), tmp_path / "out", SMALL_BLOCKS, interrupt)


def test_a_cancelled_run_stops_soon(tmp_path: Path) -> None:
    cancel, steps = threading.Event(), []

    def cancel_soon(nbytes: int) -> None:
        steps.append(nbytes)
        if len(steps) == 3:
            cancel.set()

    with pytest.raises(OutputError, match="cancelled"):
        write_weight_file(big_file(tmp_path), tmp_path / "out", SMALL_BLOCKS, cancel_soon, cancel)
    assert len(steps) < 10


def test_an_old_output_survives_a_run_that_fails(tmp_path: Path) -> None:
    target = tmp_path / "kept"
    target.write_bytes(b"old")
    file = store_all(tmp_path, {"w": np.full(5, np.nan, np.float32)}, "float32")
    with pytest.raises(ValueRefusedError):
        write_weight_file(file, target)
    assert target.read_bytes() == b"old"
    assert not list(tmp_path.glob(".*.part"))


def test_a_missing_directory_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="can't be written") as caught:
        write_weight_file(big_file(tmp_path), tmp_path / "missing" / "out")
    assert caught.value.file == str(tmp_path / "missing" / "out")


def test_a_name_that_is_taken_by_a_directory_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OutputError, match="can't be written"):
        write_weight_file(big_file(tmp_path), tmp_path / "taken")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a small tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_told_before_the_work_with_the_bytes_needed(tmp_path: Path, small_disk: Path) -> None:
    steps: list[int] = []
    with pytest.raises(OutputError, match="no space left") as caught:
        write_weight_file(big_file(tmp_path), small_disk / "model.safetensors", progress=steps.append)
    assert caught.value.expected == f"{4096 + 6_000_000} bytes free"
    assert re.fullmatch(r"\d+ bytes free", str(caught.value.found))
    assert steps == []
    assert list(small_disk.iterdir()) == []


def test_a_file_size_limit_is_an_output_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = big_file(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(OutputError, match="can't be written"):
            write_weight_file(file, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


KILLED_RUN = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins without
sys.path[:0] = [sys.argv[2]]
from pathlib import Path
import numpy as np
from engine_sources import store_all
from ckptflow.engine import EngineOptions, write_weight_file
root = Path(sys.argv[1])
file = store_all(root, {"w": np.ones(3_000_000, np.float32)}, "float32", "bfloat16")
def slow(nbytes):
    print("step", flush=True)
    time.sleep(0.2)
write_weight_file(file, root / "killed.safetensors", EngineOptions(memory_budget_bytes=500_000), slow)
"""


def test_a_killed_run_leaves_nothing_under_the_final_name_and_the_next_one_works(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_RUN, str(tmp_path), str(Path(__file__).parent / "support")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline() == b"step\n"
        process.send_signal(signal.SIGKILL)
    target = tmp_path / "killed.safetensors"
    assert not target.exists()
    assert (tmp_path / ".killed.safetensors.part").exists()
    record = write_weight_file(big_file(tmp_path), target)
    assert target.stat().st_size == record.nbytes


def test_ctrl_c_ends_a_run_that_waits_for_its_threads(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_RUN, str(tmp_path), str(Path(__file__).parent / "support")]
    begin = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert b"KeyboardInterrupt" in errors
    assert time.monotonic() - begin < 10
    assert not list(tmp_path.glob("*killed*"))
    assert not list(tmp_path.glob(".*killed*"))
