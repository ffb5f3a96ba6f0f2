"""Merging by the workers of a cluster: real processes, killed while they write."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoints import TINY, write_fsdp_step
from ckptflow.conversion import plan_conversion
from ckptflow.errors import SourceChangedError, UsageError
from ckptflow.files.locks import exclusive
from ckptflow.request import ConvertRequest
from daskcluster import DaskCluster, kill_in_the_middle_of_a_file, running_dask
from flowcases import converted, finish_killed, first_nan, wait_for, without_record, written_files
from flowruns import FlowLab, finish, flow_environment
from publishing import contents_of

pytestmark = pytest.mark.service

WORKERS = 3
LARGER = {**TINY, "hidden_size": 384, "intermediate_size": 1024, "head_dim": 96, "vocab_size": 4096}
FILES = ("--max-shard-size", "1700KB")
MANY_FILES = ("--max-shard-size", "3KB")
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


@pytest.fixture(scope="module")
def cluster(lab: FlowLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskCluster]:
    """A scheduler and three workers that know nothing of flows, servers or checkpoints."""
    environment = flow_environment(None, tmp_path_factory.mktemp("workers-home"), {})
    with running_dask(tmp_path_factory.mktemp("dask"), WORKERS, environment) as running:
        yield running


@pytest.mark.parametrize("runner", ["dask", pytest.param("ray", marks=needs_ray)])
def test_a_worker_killed_in_the_middle_of_a_file_costs_that_file_alone(
    lab: FlowLab, tmp_path: Path, runner: str, request: pytest.FixtureRequest
) -> None:
    run_name, work = f"cluster-{runner}", tmp_path / "work"
    path = write_fsdp_step(tmp_path / run_name, config=LARGER)
    expected = converted(path, tmp_path / "out", *FILES)
    options = (*FILES, "--no-forward", "--work-dir", str(work), "--keep-local")
    cluster: DaskCluster | None = request.getfixturevalue("cluster") if runner == "dask" else None
    own = {"CKPTFLOW_TASK_RUNNER": runner, "CKPTFLOW_FILES_AT_ONCE": str(WORKERS)}

    process = lab.start(path, (tmp_path / "models").as_uri(), *options, **(own if cluster is None else on(cluster)))
    wait_for(lambda: any(work.rglob("*.records/*.json")), seconds=200)
    killed = kill_in_the_middle_of_a_file(process.pid if cluster is None else cluster.workers_pid, work)
    before = {name: facts for name, facts in written_files(work).items() if any(work.rglob(f"{name}.json"))}
    done = finish(process)

    assert done.status == 0, done.stderr
    published = contents_of(tmp_path / "models" / run_name / "step-10")
    assert without_record(published) == without_record(expected)
    (run,) = lab.runs(f"post-training {run_name} step-10")
    merges = lab.file_runs(run)
    files = sorted(name for name in expected if name.endswith(".safetensors"))
    assert len(files) >= 8
    assert len(merges) == len(files)
    assert {task["state_name"] for task in [run, *merges]} == {"Completed"}
    assert killed not in before
    assert written_files(work).items() >= before.items(), "finished files were not written again"


def test_a_file_that_is_refused_stops_the_workers_of_all_others(
    lab: FlowLab, cluster: DaskCluster, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    path = write_fsdp_step(tmp_path / "cluster-nan", changes={"model.embed_tokens.weight": first_nan})
    options = (*MANY_FILES, "--no-forward", "--work-dir", str(work))
    last = plan_conversion(ConvertRequest(path=path, out=tmp_path / "out", max_shard_bytes=3000)).plan.files[-1].name
    process = lab.start(path, (tmp_path / "models").as_uri(), *options, **on(cluster))
    wait_for(lambda: any(work.rglob("*.records")))
    (records,) = work.rglob("*.records")
    with exclusive(records / f"{last}.lock"):  # its worker waits until another one has met the NaN
        wait_for(lambda: states_of_files(lab, "cluster-nan")["Failed"] == 1, seconds=200)
    done = finish(process)
    assert done.status == 1
    (outcome,) = done.outcomes
    assert outcome["state"] == "refused"
    assert "NaN" in outcome["detail"]
    states = states_of_files(lab, "cluster-nan")
    assert states["Failed"] == 1
    assert states["Cancelled"] >= 1  # and those done before are left
    assert set(states) <= {"Failed", "Cancelled", "Completed"}
    assert not any(work.rglob("model-*"))


def states_of_files(lab: FlowLab, run_name: str) -> Counter[str]:
    """How many weight files are in which state."""
    return Counter(
        task["state_name"] for run in lab.runs(f"post-training {run_name} step-10") for task in lab.file_runs(run)
    )


@pytest.mark.slow
def test_workers_whose_run_was_killed_do_not_disturb_the_next_one(
    lab: FlowLab, cluster: DaskCluster, tmp_path: Path
) -> None:
    work, uri = tmp_path / "work", (tmp_path / "models").as_uri()
    path = write_fsdp_step(tmp_path / "cluster-left", config=LARGER)
    expected = converted(path, tmp_path / "out", *FILES)
    options = (*FILES, "--no-forward", "--work-dir", str(work), "--keep-local")
    process = lab.start(path, uri, *options, **on(cluster))
    wait_for(lambda: any(work.rglob("*.records/*.json")), seconds=200)
    os.killpg(process.pid, signal.SIGKILL)
    finish_killed(process)
    done = lab.run(path, uri, *options, **on(cluster))
    assert done.status == 0, done.stderr
    published = contents_of(tmp_path / "models" / "cluster-left" / "step-10")
    assert without_record(published) == without_record(expected)


@pytest.mark.slow
def test_a_cluster_of_its_own_reports_to_the_temporary_server_of_the_run(lab: FlowLab, tmp_path: Path) -> None:
    path = write_fsdp_step(tmp_path / "cluster-alone")
    home = tmp_path / "home"
    alone = FlowLab(server=lab.server, environment=flow_environment(None, home, {}))
    settings = {"CKPTFLOW_TASK_RUNNER": "dask", "CKPTFLOW_FILES_AT_ONCE": "2"}
    done = alone.run(path, (tmp_path / "models").as_uri(), *MANY_FILES, "--no-forward", **settings)
    assert done.status == 0, done.stderr
    published = contents_of(tmp_path / "models" / "cluster-alone" / "step-10")
    assert without_record(published) == without_record(converted(path, tmp_path / "out", *MANY_FILES))


def on(cluster: DaskCluster) -> dict[str, str]:
    """The settings for it."""
    return {"CKPTFLOW_TASK_RUNNER": "dask", "CKPTFLOW_CLUSTER_ADDRESS": cluster.address}


# --- what workers refuse


def test_a_worker_refuses_files_that_were_touched_since_they_were_planned(tmp_path: Path) -> None:
    from ckptflow_tasks.planning import plan_anew, planned, state_of_sources

    path = write_fsdp_step(tmp_path / "touched")
    request = ConvertRequest(path=path, out=tmp_path / "out")
    conversion = plan_anew(request)
    sources = state_of_sources(conversion)
    assert planned(request, conversion.fingerprint, sources) is conversion
    rank_file = path / "actor" / "model_world_size_2_rank_1.pt"
    os.utime(rank_file, ns=(0, rank_file.stat().st_mtime_ns + 1))
    later = plan_anew(request)
    assert later.fingerprint == conversion.fingerprint, "a copy is the same checkpoint"
    with pytest.raises(SourceChangedError):
        planned(request, conversion.fingerprint, sources)
    assert planned(request, conversion.fingerprint, state_of_sources(later)).manifest == later.manifest


def test_a_worker_that_planned_the_files_as_they_were_before_plans_again(tmp_path: Path) -> None:
    from ckptflow_tasks.planning import plan_anew, planned, state_of_sources

    path = write_fsdp_step(tmp_path / "again")
    request = ConvertRequest(path=path, out=tmp_path / "out")
    before = plan_anew(request)
    write_fsdp_step(tmp_path / "again", changes={"model.norm.weight": torch.ones_like})
    now = plan_conversion(request)
    assert now.fingerprint != before.fingerprint
    assert planned(request, now.fingerprint, state_of_sources(now)).manifest == now.manifest


def test_another_version_and_a_cluster_without_a_server_are_refused(tmp_path: Path) -> None:
    from ckptflow_flows.runners import Workers
    from ckptflow_tasks.orders import Order, WorkerError

    with pytest.raises(WorkerError, match="another version"):
        Order(permit=tmp_path / "permit", sources="", version="0.0.1").check_version()
    with pytest.raises(UsageError, match="Prefect server"):
        Workers(task_runner="dask", cluster_address="tcp://127.0.0.1:8786").prefect_runner()
