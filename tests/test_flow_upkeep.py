"""The flows retain and disk-usage against a real Prefect server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from checkpoints import write_fsdp_step
from ckptflow.callbacks.events import PrefectApi, ready_event
from ckptflow.discovery.discover import discover
from flowcases import wait_for
from flowruns import HERE, FlowLab
from retained import age, names_in, publish

pytestmark = pytest.mark.service


def run_flows(lab: FlowLab, *cases: dict[str, Any]) -> list[dict[str, Any]]:
    """Final states of the flows, one after the other in one process."""
    done = subprocess.run(
        [sys.executable, str(HERE / "upkeep_process.py")],
        input=json.dumps(cases),
        env=dict(lab.environment),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    states: list[dict[str, Any]] = json.loads(done.stdout)
    return states


def about(path: Path, metrics: dict[str, float]) -> dict[str, Any]:
    """An event about a checkpoint."""
    (found,) = discover([path], settle_seconds=0)
    return ready_event(found, None, metrics, key=uuid4())


def events_below(lab: FlowLab, root: Path) -> list[Any]:
    query = {"resource": {"id_prefix": [f"ckptflow.checkpoint.{root}"]}, "occurred": {"since": "2000-01-01T00:00:00Z"}}
    events: list[Any] = lab.ask("events/filter", {"filter": query, "limit": 50})["events"]
    return events


def test_retain_and_disk_usage_show_what_they_found_and_did(lab: FlowLab, tmp_path: Path) -> None:
    root = tmp_path / "upkeep-runs"
    for step in (9, 10, 11):
        directory = write_fsdp_step(root / "sft", step)
        (directory / "actor" / "optim_world_size_2_rank_0.pt").write_bytes(bytes(300_000))
        if step != 10:
            publish(directory, f"file://{tmp_path}/models", tmp_path / "scratch")
    age(root)
    # As a trainer's callback announces a checkpoint, and as any evaluation may.
    PrefectApi(url=lab.server.api_url, headers={"Content-Type": "application/json"}).send(
        [
            about(root / "sft" / f"global_step_{step}" / "actor", {"acc": value})
            for step, value in ((9, 0.5), (10, 0.75))
        ]
    )
    wait_for(lambda: len(events_below(lab, root)) == 2, 120)
    published = {"destinations": [{"uri": f"file://{tmp_path}/models"}]}
    keep = {"newest": 1, "best": {"count": 1, "metric": "acc", "mode": "max"}}
    parameters = {"roots": [str(root)], "published": published, "keep": keep}
    unwritable = {"roots": str(root), "published": {"destinations": "file:///"}}
    usage, dry, wet, again, refused = run_flows(
        lab,
        {"flow": "disk-usage", "parameters": parameters},
        {"flow": "retain", "parameters": {**parameters, "dry_run": True}},
        {"flow": "retain", "parameters": parameters},
        {"flow": "retain", "parameters": parameters},
        {"flow": "retain", "parameters": {**unwritable, "keep": {"newest": 1}}},
    )
    assert usage["type"] == dry["type"] == wet["type"] == again["type"] == "COMPLETED"
    assert dry["message"].startswith("1 of 3 steps would go")
    assert dry["name"] == "DryRun"
    assert wet["message"].startswith("1 of 3 steps deleted")
    assert again["message"].startswith("0 of 2 steps deleted")
    assert refused["type"] == "FAILED"
    assert names_in(root / "sft") == {"global_step_10", "global_step_11"}
    _check_artifacts_of_retain(lab)
    _check_artifacts_of_disk_usage(lab)


def _check_artifacts_of_retain(lab: FlowLab) -> None:
    _, wet, *_ = lab.runs("retain upkeep-runs")
    assert [task["name"].split()[0] for task in lab.task_runs(wet)] == ["read", "find", "decide", "delete"]
    found = {each["key"]: each["data"] for each in lab.artifacts(wet)}
    assert {row["global step"]: row["metric"] for row in found["retention-steps"]} == {9: 0.5, 10: 0.75, 11: ""}
    decisions = {row["global step"]: (row["decision"], row["why"]) for row in found["retention"]}
    assert decisions[9] == ("delete", "published, and older than the newest 1")
    assert decisions[10] == ("keep", "among the best 1 by acc (0.75)")
    assert decisions[11][0] == "keep"
    assert [row["outcome"] for row in found["retention-deleted"]] == ["deleted"]
    assert "pie" in found["retention-picture"]


def _check_artifacts_of_disk_usage(lab: FlowLab) -> None:
    (run,) = lab.runs("disk-usage upkeep-runs")
    found = {each["key"]: each["data"] for each in lab.artifacts(run)}
    assert {row["step"] for row in found["disk-usage"]} == {"beside", 9, 10, 11}
    assert "xychart-beta" in found["disk-usage-picture"]
    assert "optimizer" in found["disk-usage-picture"]
    whats = [(row["what"], row["count"]) for row in found["disk-savings"]]
    assert whats == [("shrink", 0), ("retain the newest 1, once all are published", 1), ("retain the newest 1, now", 1)]


def test_a_flow_refuses_to_keep_none_before_it_looks(lab: FlowLab, tmp_path: Path) -> None:
    base = {"roots": [str(tmp_path)], "published": {"destinations": f"file://{tmp_path}/m"}}
    keeps = ({"newest": 0}, {"newest": -1}, {"every": 0})
    states = run_flows(lab, *({"flow": "retain", "parameters": {**base, "keep": keep}} for keep in keeps))
    assert [state["type"] for state in states] == ["FAILED"] * 3
    assert all("greater than or equal to 1" in state["message"] for state in states)
