"""A site that runs by itself: real server, workers and watcher, each of which is killed while checkpoints land.

One site for all tests, each with a training run of its own under the same root. The first thing that happens is the
slowest: a run and its worker are killed, and minutes later, in the last test, another has finished the work.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from safetensors.numpy import save_file

import documentation
from checkpoints import write_fsdp_step
from serverapi import delete_from_server
from servers.loopback import serving
from trainer_steps import make_old
from watchlab import Lab, kill, kill_alone, kill_flows, moment, running_lab, step_of, wait_until

pytestmark = [pytest.mark.service, pytest.mark.timeout(1800)]

BLOCK = "custom-webhook/people"


class Hook(BaseHTTPRequestHandler):
    """Keeps what a notification block sends."""

    received: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def hook_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    with serving(server):
        yield f"http://127.0.0.1:{server.server_address[1]}/"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, hook_url: str) -> Iterator[Lab]:
    """A fresh server, set up by one command."""
    with running_lab(tmp_path_factory.mktemp("site")) as site:
        make_block(site, hook_url)
        site.deploy("--gpus", "2", "--runs-at-once", "0", "--notify", BLOCK)
        yield site


def make_block(site: Lab, url: str) -> None:
    kind = site.ask("block_types/filter", {"block_types": {"slug": {"any_": ["custom-webhook"]}}, "limit": 20})
    types = {each["slug"]: each["id"] for each in kind} or {
        "custom-webhook": site.ask("block_types/slug/custom-webhook")["id"]
    }
    schemas = site.ask(
        "block_schemas/filter", {"block_schemas": {"block_type_id": {"any_": [types["custom-webhook"]]}}}
    )
    content = {"name": "people", "url": url, "json_data": {"subject": "{{subject}}", "body": "{{body}}"}}
    document = {
        "name": "people",
        "data": content,
        "block_schema_id": schemas[0]["id"],
        "block_type_id": types["custom-webhook"],
    }
    site.ask("block_documents/", document)


@pytest.fixture(scope="module")
def dead_run(lab: Lab) -> dict[str, Any]:
    """A run whose process was killed together with its worker, while it held a GPU slot."""
    worker = lab.start_worker()
    watcher = lab.start_watch()
    write_fsdp_step(lab.runs_dir / "killed", 10)
    wait_until(lambda: lab.gpu_slots_in_use() == 1 and is_validating(lab, "killed"), "it is in the middle")
    kill(worker)
    kill_flows(lab)
    kill(watcher)
    return lab.runs("killed")[0]


def is_validating(lab: Lab, run_name: str) -> bool:
    """Validation of a model with a config takes seconds, in which transformers is imported."""
    query = {"task_runs": {"name": {"like_": f"validate {run_name}"}, "state": {"type": {"any_": ["RUNNING"]}}}}
    return bool(lab.ask("task_runs/filter", query))


@pytest.fixture(scope="module")
def site(lab: Lab, dead_run: dict[str, Any]) -> Lab:
    """The same with workers and a watcher."""
    lab.start_worker("ckptflow")
    lab.start_worker(limit=2)
    lab.start_watch()
    return lab


def light_step(directory: Path, *, value: float = 1.0) -> Path:
    """A complete step without config.json: there is no model to load, so that its run takes two seconds."""
    directory.mkdir(parents=True)
    save_file({"weight": np.full((8, 8), value, np.float32)}, directory / "model.safetensors")
    (directory / "trainer_state.json").write_text("{}")
    make_old(directory, 3600)
    return directory


def drop(lab: Lab, run_name: str, *steps: int) -> None:
    """Steps appear under their names at once, whole."""
    (lab.runs_dir / run_name).mkdir(exist_ok=True)
    aside = lab.home.parent / "aside" / run_name
    for step in steps:
        light_step(aside / f"checkpoint-{step}", value=step).rename(lab.runs_dir / run_name / f"checkpoint-{step}")


def assert_each_step_was_made_once(lab: Lab, run_name: str, *steps: int) -> None:
    """One completed run and one event per step, and a model at the destination."""
    wait_until(lambda: lab.is_published(run_name, *steps), f"{run_name} is published")
    wait_until(lambda: all(run["state_type"] in ENDED for run in lab.runs(run_name)), "all runs ended")
    completed = Counter(step_of(run) for run in lab.runs(run_name) if run["state_name"] == "Completed")
    assert completed == Counter(steps)
    wait_until(lambda: len(lab.ready_events(run_name)) >= len(steps), "each event is stored")
    assert lab.ready_events(run_name) == sorted(str(lab.runs_dir / run_name / f"checkpoint-{n}") for n in steps)


ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def test_deploying_again_doubles_nothing(lab: Lab, dead_run: dict[str, Any]) -> None:
    def there() -> tuple[list[Any], ...]:
        deployments = lab.ask("deployments/filter", {})
        return (
            sorted((d["name"], [(s["slug"], s["active"]) for s in d["schedules"]]) for d in deployments),
            sorted(automation["name"] for automation in lab.ask("automations/filter", {})),
            sorted((pool["name"], pool["concurrency_limit"]) for pool in lab.ask("work_pools/filter", {})),
            [(limit["name"], limit["limit"]) for limit in lab.ask("v2/concurrency_limits/filter", {})],
        )

    before = there()
    lab.deploy("--gpus", "2", "--runs-at-once", "0", "--notify", BLOCK)
    assert there() == before
    schedules = dict(before[0])
    assert schedules["sweep"] == [("every-ten-minutes", True)]
    assert schedules["retain"] == [("hourly", True)]
    assert sum(map(len, schedules.values())) == 3
    assert len(before[1]) == len(set(before[1])) == 4


def test_a_dropped_checkpoint_becomes_a_published_model_with_no_further_command(site: Lab) -> None:
    drop(site, "dropped", 10)
    assert_each_step_was_made_once(site, "dropped", 10)
    assert len(site.runs("dropped")) == 1


def test_a_checkpoint_that_watch_sweep_and_its_trainer_all_see_gets_one_run(site: Lab) -> None:
    sweep = site.ask("deployments/name/sweep/sweep")["id"]
    drop(site, "seen-thrice", 10, 20)
    path = str(site.runs_dir / "seen-thrice" / "checkpoint-10")
    announcement = {
        "occurred": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "event": "ckptflow.checkpoint.ready",
        "resource": {"prefect.resource.id": f"ckptflow.checkpoint.{path}", "ckptflow.announced-by": "trainer"},
        "payload": {"path": path},
    }
    site.ask("events", [announcement | {"id": "6f1e7f2e-0000-4000-8000-000000000001"}])
    site.ask("events", [announcement | {"id": "6f1e7f2e-0000-4000-8000-000000000002"}])
    for _ in range(2):
        site.ask(f"deployments/{sweep}/create_flow_run", {"parameters": {"settle_seconds": 0}})
    wait_until(lambda: len(finished_sweeps(site)) >= 4, "both sweeps and both announcements are done")
    wait_until(lambda: site.is_published("seen-thrice", 10, 20), "published")
    assert sorted(step_of(run) for run in site.runs("seen-thrice")) == [10, 20]


def finished_sweeps(lab: Lab) -> list[dict[str, Any]]:
    runs = lab.ask("flow_runs/filter", {"flows": {"name": {"any_": ["sweep"]}}})
    assert not [run for run in runs if run["state_type"] in ("FAILED", "CRASHED")]
    return [run for run in runs if run["state_type"] == "COMPLETED"]


def test_a_trainer_that_announces_a_checkpoint_elsewhere_gets_it_published(site: Lab) -> None:
    step = light_step(site.home.parent / "elsewhere" / "announced" / "checkpoint-7")
    event = {
        "occurred": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "event": "ckptflow.checkpoint.ready",
        "resource": {"prefect.resource.id": f"ckptflow.checkpoint.{step}", "ckptflow.announced-by": "trainer"},
        "payload": {"path": str(step), "global_step": 7},
        "id": "6f1e7f2e-0000-4000-8000-000000000003",
    }
    site.ask("events", [event])
    wait_until(lambda: site.is_published("announced", 7), "published")
    assert len(site.runs("announced")) == 1


@pytest.mark.parametrize("count", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_steps_that_come_at_once_are_all_made_once_and_the_newest_first(site: Lab, count: int) -> None:
    name = f"burst-{count}"
    aside = site.home.parent / "aside" / name
    for step in range(1, count + 1):
        light_step(aside / f"checkpoint-{step}", value=step)
    aside.rename(site.runs_dir / name)
    assert_each_step_was_made_once(site, name, *range(1, count + 1))
    runs = site.runs(name)
    assert len(runs) == count
    created = [step_of(run) for run in sorted(runs, key=lambda run: moment(run["created"]))]
    assert created == list(range(count, 0, -1))
    taken = [step_of(run) for run in sorted(runs, key=lambda run: taken_at(site, run))]
    # The worker takes two at a time, and either may be the first to say so.
    assert all(abs(taken.index(step) - (count - step)) <= 2 for step in taken)


def taken_at(lab: Lab, run: dict[str, Any]) -> float:
    """When a worker took a run; how long its process needs until it runs is another matter."""
    states = lab.ask(f"flow_run_states/?flow_run_id={run['id']}")
    return min(moment(state["timestamp"]) for state in states if state["type"] == "PENDING")


def test_nothing_is_lost_or_doubled_when_server_worker_and_watcher_are_killed(site: Lab) -> None:
    # The run that takes over from the dead one must not be among those that die here.
    wait_until(lambda: site.is_published("killed", 10), "another run has finished the work of the dead one")
    server, worker, watcher = (latest(site, name) for name in ("server", "ckptflow-gpu", "watch"))
    drop(site, "restarts", 1, 2)
    wait_until(lambda: site.runs("restarts"), "the first run is made")
    kill_alone(worker)
    drop(site, "restarts", 3)
    kill(watcher)
    drop(site, "restarts", 4)
    kill(server)
    site.start_watch("--pending-seconds", "20")
    drop(site, "restarts", 5)
    time.sleep(3)
    site.start_server()
    site.start_worker(limit=2)
    assert_each_step_was_made_once(site, "restarts", 1, 2, 3, 4, 5)


def latest(lab: Lab, word: str) -> subprocess.Popen[bytes]:
    """The newest process that was started with this word on its command line."""
    return [process for process in lab.started if word in process.args][-1]  # type: ignore[operator]


def test_people_hear_of_refused_checkpoints_and_of_failures_in_different_words(site: Lab) -> None:
    light_step(site.home.parent / "aside" / "refused" / "checkpoint-1", value=float("nan"))
    (site.home.parent / "aside" / "refused").rename(site.runs_dir / "refused")
    (site.runs_dir / "broken").mkdir()
    (site.runs_dir / "broken" / ".ckptflow").write_text("a file where the work directory has to be")
    drop(site, "broken", 1)
    wait_until(lambda: {"refused", "broken"} <= {said(message) for message in Hook.received}, "both are told")
    of = {said(message): message for message in Hook.received}
    assert "refused a checkpoint" in of["refused"]["subject"]
    assert "NaN" in of["refused"]["body"]
    assert "failed" in of["broken"]["subject"]
    assert "machine is at fault" in of["broken"]["body"]
    (refused,), (broken,) = site.runs("refused"), site.runs("broken")
    assert (refused["state_name"], broken["state_name"]) == ("Refused", "Failed")
    shutil.rmtree(site.runs_dir / "broken")


def said(message: dict[str, Any]) -> str:
    """Which training run a notification is about."""
    return next((name for name in ("refused", "broken", "killed") if f"{name} step-" in message["body"]), "")


def test_watching_in_one_process_needs_no_worker_and_ends_when_told(site: Lab) -> None:
    root = site.home.parent / "alone"
    root.mkdir()
    alone = site.start(
        "in-process", "ckptflow.cli", "watch", str(root), "--to", site.destination, "--in-process", "--no-forward"
    )
    light_step(site.home.parent / "aside" / "alone" / "checkpoint-3").parent.rename(root / "in-process")
    wait_until(lambda: site.is_published("in-process", 3), "published")
    (run,) = site.runs("in-process")
    assert run["deployment_id"] is None
    alone.terminate()
    assert alone.wait(60) == 130


def test_a_run_that_was_killed_with_its_worker_is_finished_by_another(site: Lab, dead_run: dict[str, Any]) -> None:
    wait_until(lambda: site.ask(f"flow_runs/{dead_run['id']}")["state_type"] == "CRASHED", "it is seen as dead")
    wait_until(lambda: site.is_published("killed", 10), "another run has finished the work")
    runs = site.runs("killed")
    states = Counter(run["state_name"] for run in runs)
    assert states["Completed"] == 1
    assert states["Crashed"] == len(runs) - 1
    wait_until(lambda: site.gpu_slots_in_use() == 0, "the GPU slot is free again")
    assert site.ready_events("killed") == [str(site.runs_dir / "killed" / "global_step_10" / "actor")]


def test_no_automation_has_failed(site: Lab) -> None:
    assert site.events("prefect.automation.action.triggered") != []
    reasons = [event["payload"].get("reason") for event in site.events("prefect.automation.action.failed")]
    # A server that is killed loses events, also that a run has ended: later it takes it for dead, and then refuses to
    # change the state of a run that has ended. One that is busy starts no run for an event of a trainer; sweep does.
    known = ("already in terminal state", "Unexpected status from 'run-deployment' action: 503")
    assert [reason for reason in reasons if not any(each in str(reason) for each in known)] == []


def test_the_files_for_other_sites_deploy_as_the_page_on_operations_shows(lab: Lab) -> None:
    page = documentation.ROOT / "docs" / "operations.md"
    shown = [command.words for command in documentation.commands(page) if command.words[:2] == ("ckptflow", "deploy")]
    others = [words for words in shown if "--file" in words]
    assert {Path(words[words.index("--file") + 1]).name for words in others} == {"slurm.yaml", "kubernetes.yaml"}
    lab.stop_workers()  # which would make their pool again
    for words in others:
        for pool in lab.ask("work_pools/filter", {}):  # the pools of one kind of site are not those of another
            delete_from_server(lab.api_url, f"work_pools/{pool['name']}")
        said = lab.run("ckptflow.cli", *words[1:], CKPTFLOW_IMAGE="ckptflow:test", CKPTFLOW_NAMESPACE="training")
        assert "deployment post-training" in said
        kinds = {pool["name"]: pool["type"] for pool in lab.ask("work_pools/filter", {})}
        kind = words[words.index("--pool-type") + 1] if "--pool-type" in words else "ckptflow"
        assert kinds == {"ckptflow-gpu": kind, "ckptflow": kind}
