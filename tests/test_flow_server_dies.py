"""A Prefect server that really dies in the middle of `ckptflow run`, and comes back, or does not.

The run waits for the lock of its checkpoint, which the test holds, so that the server dies at a moment that is known.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptflow.convert import convert
from ckptflow.discovery.destinations import destination_of, work_lock, work_path
from ckptflow.files.locks import exclusive
from ckptflow.formats.registry import locate
from ckptflow.publish.upload import upload
from ckptflow.request import ConvertRequest
from flowruns import finish
from trainer_steps import hf_step
from watchlab import Lab, kill, running_lab, wait_until

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("dying")) as site:
        yield site


@contextmanager
def held_up(lab: Lab, step: Path, path: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """``ckptflow run PATH``, which has begun the run for one step and waits there until the end of the context."""
    with exclusive(work_lock(work_path(locate(step)))):
        process = subprocess.Popen(
            [sys.executable, "-m", "ckptflow.cli", "run", str(path), "--to", lab.destination, "--no-forward", "--json"],
            env=lab.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        lab.started.append(process)  # type: ignore[arg-type]  # text or bytes is all one to who ends it
        wait_until(lambda: [run["state_type"] for run in runs_of(lab, step)] == ["RUNNING"], "it has begun")
        yield process


def runs_of(lab: Lab, step: Path) -> list[dict[str, object]]:
    return [run for run in lab.runs(step.parent.name) if json.dumps(str(step)) in json.dumps(run["parameters"])]


def kill_server(lab: Lab) -> None:
    kill(next(process for process in reversed(lab.started) if "server" in process.args))  # type: ignore[operator]


def test_a_run_outlives_a_restart_of_the_server_and_the_server_knows_its_end(lab: Lab) -> None:
    step = hf_step(lab.runs_dir / "outlived" / "checkpoint-10")
    with held_up(lab, step, step) as process:
        kill_server(lab)
    # It goes on without a server, and waits where it needs a slot.
    lab.start_server()
    finished = finish(process)
    assert [outcome["state"] for outcome in finished.outcomes] == ["published"], finished.stderr
    assert lab.is_published("outlived", 10)
    assert [run["state_name"] for run in runs_of(lab, step)] == ["Completed"]


def test_what_was_done_before_the_server_died_for_good_is_told(lab: Lab, tmp_path: Path) -> None:
    first, second = (hf_step(lab.runs_dir / "half" / f"checkpoint-{n}") for n in (10, 20))
    # Nothing is left to do for which it would wait.
    convert(ConvertRequest(path=second, out=tmp_path / "model"))
    upload(tmp_path / "model", destination_of(locate(second), lab.destination))
    # By default each last word to the server is tried for a minute.
    with held_up(lab, second, first.parent, PREFECT_CLIENT_MAX_RETRIES="1") as process:
        kill_server(lab)
    finished = finish(process)
    assert finished.status == 1
    assert [(each["path"], each["state"]) for each in finished.outcomes] == [(str(first), "published")]
    assert "\nckptflow: the Prefect server can't be reached\n" in finished.stderr
