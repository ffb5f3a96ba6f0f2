"""A Prefect server that really dies in the middle of `ckptflow run`, and comes back, or does not.

The run waits for the lock of its checkpoint, which the test holds, so that the server dies at a moment that is known.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
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
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("dying")) as running:
        yield running


@pytest.fixture
def lab(site: Lab) -> Lab:
    """With a server, whatever became of that of the test before."""
    if not site.is_healthy():
        site.start_server()
    return site


@contextmanager
def held_up(lab: Lab, step: Path, path: Path, n: int = 1, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """``ckptflow run PATH``, which has begun run ``n`` for one step and waits there until the end of the context."""
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
        wait_until(lambda: [run["state_type"] for run in runs_of(lab, step)] == ["RUNNING"] * n, "it has begun")
        wait_until(lambda: waits_for_a_lock(process.pid), "it waits")
        yield process


def waits_for_a_lock(pid: int) -> bool:
    """Whether a process stands in line, as proc_locks(5) shows with an arrow."""
    lines = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return any(fields[1] == "->" and fields[5] == str(pid) for fields in lines)


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


def test_a_run_that_is_told_to_end_does_so_in_time_without_a_server_and_is_finished_by_the_next(lab: Lab) -> None:
    step = hf_step(lab.runs_dir / "told-to-end" / "checkpoint-10")
    with held_up(lab, step, step) as process:
        kill_server(lab)
        told = time.monotonic()
        process.terminate()
        process.communicate(timeout=200)
        # Prefect tries each last word for a minute; Slurm kills after 30 seconds.
        assert time.monotonic() - told < 25
    assert process.returncode != 0
    lab.start_server()
    assert not lab.is_published("told-to-end", 10)
    assert [run["state_name"] for run in runs_of(lab, step)] == ["Running"], "nothing is done that is not"
    with held_up(lab, step, step, n=2) as again:
        pass
    finished = finish(again)
    assert [outcome["state"] for outcome in finished.outcomes] == ["published"], finished.stderr
    assert runs_of(lab, step)[-1]["state_name"] == "Completed"


ARTIFACTS = """
import json, os, signal, sys, time
from prefect import flow, task
from ckptflow_tasks import artifacts

@task
def show():
    seconds = []
    artifacts.table("first", "with a server", [{"a": 1}])
    os.kill(int(sys.argv[1]), signal.SIGKILL)
    for _ in range(3):
        started = time.monotonic()
        artifacts.table("later", "without one", [{"a": 1}])
        seconds.append(time.monotonic() - started)
    print(json.dumps(seconds), flush=True)
    os._exit(0)

@flow
def shows():
    show()

shows()
"""


def test_without_a_server_one_artifact_waits_for_it_and_no_other_does(lab: Lab) -> None:
    server = next(process for process in reversed(lab.started) if "server" in process.args)  # type: ignore[operator]
    command = [sys.executable, "-c", ARTIFACTS, str(server.pid)]
    environment = lab.environment | {"PREFECT_CLIENT_MAX_RETRIES": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True)
    first, *later = json.loads(done.stdout.splitlines()[-1])
    assert first > 3, "2 and 4 seconds"
    assert max(later) < 2
