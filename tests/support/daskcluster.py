"""A Dask scheduler and workers as processes of their own, and the worker that is in the middle of a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class DaskCluster:
    """A running cluster.

    Attributes:
        address: of its scheduler.
        workers_pid: process whose children are the workers.
    """

    address: str
    workers_pid: int


@contextmanager
def running_dask(directory: Path, workers: int, environment: Mapping[str, str]) -> Iterator[DaskCluster]:
    """One thread per worker; a worker that dies is replaced."""
    scheduler_file = directory / "scheduler.json"
    options = ("--scheduler-file", str(scheduler_file), "--no-dashboard")
    per_worker = ("--nworkers", str(workers), "--nthreads", "1", "--memory-limit", "0")
    with (directory / "dask.log").open("wb") as log:
        started = []
        try:
            for program, more in (("scheduler", ("--host", "127.0.0.1", "--port", "0")), ("worker", per_worker)):
                command = [sys.executable, "-m", "dask", program, *options, *more]
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=directory))
            while not scheduler_file.is_file() or len(workers_below(started[1].pid)) < workers:
                assert all(process.poll() is None for process in started), (directory / "dask.log").read_text()
                time.sleep(0.05)
            address = json.loads(scheduler_file.read_text())["address"]
            yield DaskCluster(address=address, workers_pid=started[1].pid)
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                process.wait(timeout=60)


def workers_below(pid: int) -> list[psutil.Process]:
    """The processes below it that run tasks."""
    below = psutil.Process(pid).children(recursive=True)
    return [each for each in below if is_worker(each)]


def is_worker(process: psutil.Process) -> bool:
    """Whether it is a worker process of Dask or Ray."""
    with suppress(psutil.Error):
        command = " ".join(process.cmdline())
        return "spawn_main" in command or command.startswith("ray::")
    return False


def kill_in_the_middle_of_a_file(pid: int, work: Path, seconds: float = 250.0) -> str:
    """``kill -9`` a worker below ``pid`` that writes a weight file below ``work`` now; gives the file's name.

    All workers are stopped first and looked at then: what a worker has open while it stands still, it had not finished.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(work.rglob(".model-*.part")):
            time.sleep(0.002)
            continue
        workers = workers_below(pid)
        _signal(workers, signal.SIGSTOP)
        try:
            for worker in workers:
                unfinished = _unfinished_file(worker, work)
                if unfinished is not None:
                    worker.kill()
                    return unfinished
        finally:
            _signal(workers, signal.SIGCONT)
    raise AssertionError("no worker was seen in the middle of a file")


def _unfinished_file(worker: psutil.Process, work: Path) -> str | None:
    with suppress(psutil.Error):
        for file in worker.open_files():
            path = Path(file.path)
            if path.is_relative_to(work) and path.name.endswith(".part") and path.exists():
                return path.name.removeprefix(".").removesuffix(".part")
    return None


def _signal(workers: list[psutil.Process], number: signal.Signals) -> None:
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker.pid, number)
