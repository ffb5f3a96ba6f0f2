"""`ckptflow demo` from the command line: real training, real servers, real flow runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_demo_publishes_each_checkpoint_and_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckptflow.cli", "demo", "--steps", "1", "2", "--output", str(tmp_path)]
    env = {**os.environ, "COLUMNS": "120", "PREFECT_API_URL": "http://127.0.0.1:9/api"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    for step in (1, 2):
        assert f"s3://demo/austen/step-{step} " in done.stdout
        assert f"global step {step} continues" in done.stdout
    assert len(re.findall(r": Completed, \d+ s", done.stdout)) == 2
    assert commands_that_mention(tmp_path) == []


def commands_that_mention(directory: Path) -> list[str]:
    """Command lines and environments of processes that name the directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:  # ended meanwhile, or not ours
            continue
        if os.fsencode(directory) in text and process.name != str(os.getpid()):
            found.append(text[:200].decode(errors="replace"))
    return found
