"""The worker of our pools runs flows in forked processes: what a run can tell of it, and how such processes end."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.workers.process import ProcessJobConfiguration

from ckptflow_flows import forking
from ckptflow_flows.forking import WarmProcess
from watchlab import Lab, running_lab, wait_until

FLOWS = """
import logging
import os
import sys
import time

from prefect import flow, get_run_logger


@flow
def tell(wait_seconds: float = 0.0) -> None:
    # The fork server's command line stays that of its children.
    with open("/proc/self/cmdline", "rb") as file:
        is_forked = b"multiprocessing.forkserver" in file.read()
    get_run_logger().info(
        "forked=%s pid=%d leader=%s threads=%s cwd=%s arguments=%d library=%s",
        is_forked, os.getpid(), os.getsid(0) == os.getpid(), os.environ.get("OMP_NUM_THREADS"), os.getcwd(),
        len(sys.argv), os.environ.get("CKPTFLOW_WORDS"),
    )
    logging.getLogger("ckptflow.convert").warning("the library has its say")
    time.sleep(wait_seconds)
    get_run_logger().info("the last word")


@flow
def fail() -> None:
    raise ValueError("as asked")
"""
SEEN_LATE = {"PREFECT_LOGGING_EXTRA_LOGGERS": "ckptflow", "CKPTFLOW_WORDS": "seen"}


@dataclasses.dataclass(frozen=True, slots=True)
class Desk:
    """Starts runs of the flows above."""

    lab: Lab

    def start(self, deployment: str, **parameters: object) -> str:
        found = self.lab.ask(f"deployments/name/{deployment.split('-')[0]}/{deployment}")
        body = {"state": {"type": "SCHEDULED"}, "parameters": parameters}
        return str(self.lab.ask(f"deployments/{found['id']}/create_flow_run", body)["id"])

    def state(self, run: str) -> Any:
        return self.lab.ask(f"flow_runs/{run}")["state"]

    def end(self, run: str, name: str) -> Any:
        """The state in which the run ended, which has that name."""
        final = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
        wait_until(lambda: self.state(run)["type"] in final, f"{run} has ended")
        state = self.state(run)
        assert state["name"] == name, (state, self.said(run))
        return state

    def said(self, run: str) -> list[str]:
        body = {"logs": {"flow_run_id": {"any_": [run]}}, "sort": "TIMESTAMP_ASC"}
        return [line["message"] for line in self.lab.ask("logs/filter", body)]

    def facts(self, run: str) -> dict[str, str]:
        """What the flow ``tell`` told of its process."""
        wait_until(lambda: any(line.startswith("forked=") for line in self.said(run)), "its facts are stored")
        (line,) = [line for line in self.said(run) if line.startswith("forked=")]
        return dict(word.split("=", 1) for word in line.split())


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with running_lab(tmp_path_factory.mktemp("worker")) as lab:
        (lab.home / "worker_test_flows.py").write_text(FLOWS)
        job = {"work_pool": {"name": "warm", "job_variables": {"env": SEEN_LATE}}, "pull": [], "build": None}
        early = {"work_pool": {"name": "warm", "job_variables": {"env": {"OMP_NUM_THREADS": "3"}}}}
        deployments = [
            {"name": "tell-warm", "entrypoint": "worker_test_flows.tell", **job},
            {"name": "tell-early", "entrypoint": "worker_test_flows.tell", **job, **early},
            {"name": "fail-warm", "entrypoint": "worker_test_flows.fail", **job},
        ]
        file = lab.home / "prefect.yaml"
        file.write_text(yaml.safe_dump({"name": "worker", "prefect-version": "3.9.1", "deployments": deployments}))
        places = {"PYTHONPATH": str(lab.home)}
        lab.run("prefect", "work-pool", "create", "warm", "--type", "ckptflow", **places)
        lab.run("prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file), **places)
        lab.start("worker-warm", "prefect", "worker", "start", "--pool", "warm", **places)
        yield Desk(lab)


@pytest.mark.service
def test_a_run_is_a_process_of_its_own_that_sees_its_environment_and_loses_no_word(desk: Desk) -> None:
    first, second = desk.start("tell-warm"), desk.start("tell-warm")
    desk.end(first, "Completed")
    desk.end(second, "Completed")
    facts = [desk.facts(run) for run in (first, second)]
    for each in facts:
        assert (each["forked"], each["leader"], each["library"], each["arguments"]) == ("True", "True", "seen", "1")
    assert facts[0]["pid"] != facts[1]["pid"]
    assert facts[0]["cwd"] != facts[1]["cwd"]
    said = desk.said(first)
    assert "the library has its say" in said  # its logger was named in the run's environment
    assert "the last word" in said
    assert any(line.startswith("Finished in state Completed") for line in said)


@pytest.mark.service
def test_a_variable_that_libraries_read_when_they_are_imported_gets_a_new_interpreter(desk: Desk) -> None:
    run = desk.start("tell-early")
    desk.end(run, "Completed")
    assert desk.facts(run)["forked"] == "False"
    assert desk.facts(run)["threads"] == "3"
    assert any("its environment sets OMP_NUM_THREADS" in line for line in desk.said(run))


@pytest.mark.service
def test_a_run_that_fails_is_failed_and_not_crashed(desk: Desk) -> None:
    state = desk.end(desk.start("fail-warm"), "Failed")
    assert "as asked" in state["message"]


@pytest.mark.service
def test_a_run_that_is_cancelled_ends_with_its_process(desk: Desk) -> None:
    run = desk.start("tell-warm", wait_seconds=600)
    pid = int(desk.facts(run)["pid"])
    desk.lab.ask(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    desk.end(run, "Cancelled")
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the process has ended")


@pytest.mark.service
def test_a_run_whose_process_is_killed_is_crashed_and_the_worker_takes_the_next(desk: Desk) -> None:
    run = desk.start("tell-warm", wait_seconds=600)
    os.kill(int(desk.facts(run)["pid"]), signal.SIGKILL)
    assert "-9" in desk.end(run, "Crashed")["message"]
    desk.end(desk.start("tell-warm"), "Completed")


def test_what_a_fork_could_get_wrong_is_left_to_a_new_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "worker_test_module.py"
    module.write_text(f"__path__ = [{str(tmp_path)!r}]")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(forking, "OUR_PACKAGES", ("worker_test_module",))
    monkeypatch.setenv("HF_HOME", "/home/models")
    warm = WarmProcess()
    same = ProcessJobConfiguration(env={"HF_HOME": "/home/models", "AWS_PROFILE": "models"})
    assert warm.unfit_for(same) is None
    other = ProcessJobConfiguration(env={"HF_HOME": "/scratch", "LANG": "xx"})
    assert str(warm.unfit_for(other)).startswith("its environment sets HF_HOME")
    module.write_text(module.read_text() + "\n# a new version")
    assert "restart the worker" in str(warm.unfit_for(same))
