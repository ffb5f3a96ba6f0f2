"""Each GPU has one process at a time, whatever happens to that process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from ckptflow.engine import EngineOptions, write_weight_file
from ckptflow.engine.slots import free_gpu, lock_path
from ckptflow.errors import DeviceError, OutputError
from engine_sources import store_all
from gpu_processes import holder


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
