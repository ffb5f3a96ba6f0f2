"""Processes beside a test, and among them those that hold a GPU; loaded by ``pytest_plugins``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def python(program: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Another interpreter, which can import what tests can."""
    paths = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


HOLD_A_GPU = """
import sys, time
from ckptflow.engine.slots import free_gpu
with free_gpu(sys.argv[1:], lambda: None) as number:
    print(number, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def gpu_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the locks of GPUs are; not those of the machine."""
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
