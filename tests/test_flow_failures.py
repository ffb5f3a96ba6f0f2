"""Checkpoints that are bad and machines that are: what a run of post-training refuses, tries again, or ends in time."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import TINY, WORLD_SIZE, write_fsdp_step
from ckptflow.discovery.destinations import work_lock, work_path
from ckptflow.files.locks import exclusive, is_in_use
from ckptflow.formats.registry import locate
from flowcases import everything_about, first_nan, parameters
from flowruns import FlowLab, finish
from rank_writer import rank_name
from serverapi import delete_from_server
from servers.proxy import Answer, Request, running_proxy
from servers.seaweed import S3Server

pytestmark = pytest.mark.service

WRONG_SECRET = "a-wrong-secret-that-nobody-may-read"


def test_a_bad_checkpoint_is_refused_with_the_reason_and_leaves_nothing(lab: FlowLab, tmp_path: Path) -> None:
    bad = {
        "holds-nan": write_fsdp_step(tmp_path / "holds-nan", changes={"model.layers.2.mlp.up_proj.weight": first_nan}),
        "cut-short": write_fsdp_step(tmp_path / "cut-short"),
        "untied": write_fsdp_step(
            tmp_path / "untied",
            config={**TINY, "tie_word_embeddings": True},
            extra={"lm_head.weight": torch.ones(64, 32)},
        ),
    }
    cut = bad["cut-short"] / "actor" / rank_name(WORLD_SIZE, 1)
    os.truncate(cut, cut.stat().st_size // 2)
    models = tmp_path / "models"
    states = lab.run_flows(*({"parameters": parameters(path, models.as_uri())} for path in bad.values()))
    reasons = dict(zip(bad, (state["message"] for state in states), strict=True))
    assert [(state["type"], state["name"]) for state in states] == [("FAILED", "Refused")] * 3
    assert "NaN" in reasons["holds-nan"]
    assert "tensor: model.layers.2.mlp.up_proj.weight" in reasons["holds-nan"]
    assert f"file: {cut}" in reasons["cut-short"]
    assert "tensor: lm_head.weight" in reasons["untied"]
    assert "set tie_word_embeddings to false" in reasons["untied"]
    assert all("what to do: " in reasons[name] for name in ("holds-nan", "cut-short"))
    assert not models.exists()
    assert [path for path in tmp_path.rglob("*") if ".ckptflow" in str(path)] == []
    for name, reason in reasons.items():
        (run,) = lab.runs(f"post-training {name} step-10")
        assert run["state"]["message"] == reason
        assert {task["run_count"] for task in lab.task_runs(run)} == {1}, "nothing of it was tried again"


def test_a_checkpoint_that_training_deletes_meanwhile_is_not_called_bad(lab: FlowLab, tmp_path: Path) -> None:
    path = write_fsdp_step(tmp_path / "rotated")
    location = locate(path)
    lock = work_lock(work_path(location))
    with exclusive(lock):
        process = lab.start(path, (tmp_path / "models").as_uri(), "--no-forward")
        while not is_in_use(location.path):  # it has found the checkpoint, and waits for the lock
            assert process.poll() is None
            time.sleep(0.05)
        shutil.rmtree(path)
    finished = finish(process)
    (outcome,) = finished.outcomes
    assert (finished.status, outcome["state"]) == (1, "refused")
    assert "the checkpoint is not there any more" in outcome["detail"]
    assert "let training keep its steps for longer" in outcome["detail"]
    assert not lock.exists()


def test_a_file_with_nan_stops_the_files_beside_it(lab: FlowLab, tmp_path: Path) -> None:
    path = write_fsdp_step(tmp_path / "first-bad", changes={"model.embed_tokens.weight": first_nan})
    case = parameters(path, (tmp_path / "models").as_uri())
    case["recipe"]["max_shard_bytes"] = 3000
    (state,) = lab.run_flows({"parameters": case}, CKPTFLOW_FILES_AT_ONCE="1")
    assert state["name"] == "Refused"
    assert "NaN" in state["message"]
    (run,) = lab.runs("post-training first-bad step-10")
    merges = [task["state_name"] for task in lab.file_runs(run)]
    assert merges.count("Failed") == 1
    assert merges.count("Cancelled") == len(merges) - 1 > 3


def test_a_store_that_is_away_is_tried_again_and_then_the_run_fails(lab: FlowLab, tmp_path: Path) -> None:
    path = write_fsdp_step(tmp_path / "no-store")
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        case = parameters(path, "s3://models", endpoint_url=endpoint, attempts=1)
        (state,) = lab.run_flows({"parameters": case}, CKPTFLOW_RETRIES="3", CKPTFLOW_RETRY_DELAY_SECONDS="0.3")
    assert (state["type"], state["name"]) == ("FAILED", "Failed")
    assert "check the network and the endpoint" in state["message"]
    (run,) = lab.runs("post-training no-store step-10")
    (look,) = lab.task_runs(run)
    assert look["run_count"] == 4
    waited = waits_between_tries(lab, look)
    # 0.3, 0.6 and 1.2 seconds, with a jitter from 0.63 to 1.5 times: one may outlast the next, not the one after that.
    assert len(waited) == 3
    assert waited[0] < waited[2], "waits grow"


def waits_between_tries(lab: FlowLab, task_run: dict[str, Any]) -> list[float]:
    """Seconds that each retry was put off, from the task's states."""
    from datetime import datetime

    states = lab.ask(f"task_run_states/?task_run_id={task_run['id']}")
    scheduled = [state for state in states if state["name"] == "AwaitingRetry"]
    return [
        (
            datetime.fromisoformat(state["state_details"]["scheduled_time"])
            - datetime.fromisoformat(state["timestamp"])
        ).total_seconds()
        for state in sorted(scheduled, key=lambda state: str(state["timestamp"]))
    ]


def test_an_upload_that_failed_in_a_thread_is_tried_again_without_sending_twice(
    lab: FlowLab, s3_server: S3Server, s3_bucket_name: str, tmp_path: Path
) -> None:
    path = write_fsdp_step(tmp_path / "flaky-store")
    failures = iter([Answer(status=503, code="SlowDown"), None])

    def interfere(request: Request) -> Answer | None:
        is_third_file = request.is_content and "00003-of" in request.key
        return next(failures, None) if is_third_file else None

    with running_proxy(s3_server.endpoint_url) as proxy:
        proxy.interfere = interfere
        case = parameters(path, f"s3://{s3_bucket_name}/flaky", endpoint_url=proxy.endpoint_url, attempts=1)
        (state,) = lab.run_flows({"parameters": case}, CKPTFLOW_RETRY_DELAY_SECONDS="0.1")
    assert state["name"] == "Completed", state
    (run,) = lab.runs("post-training flaky-store step-10")
    (upload,) = [task for task in lab.task_runs(run) if task["name"].startswith("upload ")]
    assert upload["run_count"] == 2
    sent = [key for key, _ in proxy.contents()]
    assert len(sent) == len(set(sent))
    assert len(proxy.refused) == 1


THREADS = """
import errno, sys, threading
from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner
from ckptflow.errors import CorruptFileError, OutputError, SourceChangedError
from ckptflow_tasks import artifacts
from ckptflow_tasks.step import step

artifacts.UPDATE_SECONDS = 0.0
seen = []

@step("flaky", run_name="flaky {kind}", timeout_seconds=None)
def flaky(kind):
    seen.append(kind)
    is_first = seen.count(kind) == 1
    if kind == "stale" and is_first:
        raise OSError(errno.ESTALE, "Stale file handle")
    if kind == "gone" and is_first:
        raise SourceChangedError("a file can't be read") from OSError(errno.EIO, "Input/output error")
    if kind == "full":
        raise OutputError("no space left") from OSError(errno.ENOSPC, "No space left on device")
    if kind == "corrupt":
        raise CorruptFileError("not a zip file")
    artifacts.UPDATE_SECONDS = 0.0
    progress = artifacts.ByteProgress(kind, 4000)
    for _ in range(2):
        thread = threading.Thread(target=progress, args=(1000,))
        thread.start()
        thread.join()

@flow(name="threads", flow_run_name="threads", task_runner=ThreadPoolTaskRunner(max_workers=2))
def threads():
    return [future.state for future in wait(flaky.map(["stale", "gone", "full", "corrupt"]))]

def wait(futures):
    for future in futures:
        future.wait()
    return futures

threads(return_state=True)
"""


def test_in_threads_too_only_what_can_heal_is_tried_again_and_progress_is_shown(lab: FlowLab) -> None:
    environment = {**lab.environment, "CKPTFLOW_RETRY_DELAY_SECONDS": "0.1"}
    subprocess.run([sys.executable, "-c", THREADS], env=environment, check=True, capture_output=True, timeout=120)
    (run,) = lab.runs("threads")
    tries = {task["name"]: (task["state_name"], task["run_count"]) for task in lab.task_runs(run)}
    assert tries == {
        "flaky stale": ("Completed", 2),
        "flaky gone": ("Completed", 2),
        "flaky full": ("Failed", 1),
        "flaky corrupt": ("Failed", 1),
    }
    progress = [each for each in lab.artifacts(run) if each["type"] == "progress"]
    assert [each["data"] for each in progress] == [50.0, 50.0]
    assert all("2.00 kB of 4.00 kB" in each["description"] for each in progress)


def test_a_wrong_secret_fails_at_once_and_is_told_to_nobody(lab: FlowLab, s3_bucket_name: str, tmp_path: Path) -> None:
    path = write_fsdp_step(tmp_path / "wrong-secret")
    case = parameters(path, f"s3://{s3_bucket_name}/wrong")
    (state,) = lab.run_flows({"parameters": case}, AWS_SECRET_ACCESS_KEY=WRONG_SECRET)
    assert (state["type"], state["name"]) == ("FAILED", "Failed")
    assert "AWS_SECRET_ACCESS_KEY" in state["message"]
    (run,) = lab.runs("post-training wrong-secret step-10")
    (look,) = lab.task_runs(run)
    assert look["run_count"] == 1
    assert not any(WRONG_SECRET in text for text in everything_about(lab, run))


@pytest.mark.parametrize(
    ("field", "value"),
    [("uri", "s3://AKIA:hunter2@bucket/models"), ("endpoint_url", "http://AKIA:hunter2@127.0.0.1:9000")],
)
def test_a_password_in_an_address_is_refused_before_it_reaches_the_server(
    lab: FlowLab, tmp_path: Path, field: str, value: str
) -> None:
    case = parameters(tmp_path, "s3://bucket/models")
    case["destinations"][0][field] = value
    command = [sys.executable, str(Path(__file__).parent / "support" / "flow_process.py")]
    done = subprocess.run(
        command,
        input=json.dumps({"cases": [{"parameters": case}]}),
        env=dict(lab.environment),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode != 0
    assert "ValidationError" in done.stderr
    assert "hunter2" not in done.stderr + done.stdout


@contextmanager
def one_gpu(lab: FlowLab) -> Iterator[None]:
    """A limit of one on the tag ``gpu``."""
    lab.ask("concurrency_limits/", {"tag": "gpu", "concurrency_limit": 1})
    try:
        yield
    finally:
        limit = lab.ask("v2/concurrency_limits/filter", {})
        delete_from_server(lab.server.api_url, f"v2/concurrency_limits/{limit[0]['id']}")


def test_a_machine_that_is_at_fault_is_told_in_words(lab: FlowLab, tmp_path: Path) -> None:
    path = write_fsdp_step(tmp_path / "no-room-to-work")
    (tmp_path / "file").touch()
    ended = lab.run(path, (tmp_path / "models").as_uri(), "--work-dir", str(tmp_path / "file"))
    (run,) = lab.runs("post-training no-room-to-work step-10")
    assert (ended.status, run["state_name"]) == (1, "Failed")
    assert run["state"]["message"].startswith(f"can't write here; file: {tmp_path / 'file'}; found: ")
    assert "; what to do: " in run["state"]["message"]
    assert "Traceback" not in ended.stderr


def test_a_file_that_takes_too_long_stops_and_frees_the_gpu_for_the_next_run(lab: FlowLab, tmp_path: Path) -> None:
    path = write_fsdp_step(tmp_path / "slow")
    case = {"parameters": parameters(path, (tmp_path / "models").as_uri())}
    case["parameters"]["recipe"]["max_shard_bytes"] = 80_000
    with one_gpu(lab):
        (late,) = lab.run_flows(case, CKPTFLOW_FILE_TIMEOUT_SECONDS="0.000001")
        (slot,) = lab.ask("v2/concurrency_limits/filter", {})
        assert (slot["name"], slot["active_slots"]) == ("tag:gpu", 0)
        (good,) = lab.run_flows(case)
    assert (late["type"], late["name"]) == ("FAILED", "TimedOut")
    assert "CKPTFLOW_FILE_TIMEOUT_SECONDS" in late["message"]
    assert good["name"] == "Completed"
    late_run, good_run = lab.runs("post-training slow step-10")
    states = [task["state_name"] for task in lab.file_runs(late_run)]
    assert states
    assert set(states) <= {"TimedOut", "Cancelled"}
    assert {task["state_name"] for task in lab.file_runs(good_run)} == {"Completed"}


def test_an_upload_into_a_store_that_hangs_ends_at_its_time_limit(
    lab: FlowLab, s3_server: S3Server, s3_bucket_name: str, tmp_path: Path
) -> None:
    # One file of two parts: they are sent by threads, which a time limit can't interrupt.
    wide = {**TINY, "hidden_size": 256, "head_dim": 64, "vocab_size": 36_000, "tie_word_embeddings": True}
    path = write_fsdp_step(tmp_path / "hanging", config=wide)
    released = threading.Event()

    def hang(request: Request) -> Answer | None:
        if request.is_content:
            released.wait(15)
        return None

    with running_proxy(s3_server.endpoint_url) as proxy:
        proxy.interfere = hang
        case = parameters(path, f"s3://{s3_bucket_name}/hanging", endpoint_url=proxy.endpoint_url)
        case["recipe"]["max_shard_bytes"] = 10**9
        (state,) = lab.run_flows({"parameters": case}, CKPTFLOW_UPLOAD_TIMEOUT_SECONDS="1.5")
        released.set()
    assert state["type"] == "FAILED"
    assert (state["name"], "1.5 second" in state["message"]) == ("TimedOut", True), state
    (run,) = lab.runs("post-training hanging step-10")
    (upload,) = [task for task in lab.task_runs(run) if task["name"].startswith("upload ")]
    assert upload["state_name"] == "TimedOut"
    assert upload["total_run_time"] < 8
    assert upload["run_count"] == 1


def test_the_trainer_s_files_are_shrunk_in_place_only_once_they_have_settled(lab: FlowLab, tmp_path: Path) -> None:
    buffer = torch.arange(400_000, dtype=torch.float32)
    cases = []
    for name, age_seconds in (("young", 0), ("settled", 3600)):
        step = tmp_path / name / "step-7"
        step.mkdir(parents=True)
        torch.save({"w": buffer[1000:1100].view(10, 10)}, step / "pytorch_model.bin")
        for path in (step / "pytorch_model.bin", step):
            os.utime(path, (time.time() - age_seconds,) * 2)
        case = parameters(step, (tmp_path / "models").as_uri())
        cases.append({"parameters": {**case, "machine": {**case.get("machine", {}), "shrink_source": True}}})
    young, settled = lab.run_flows(*cases)
    sizes = [(tmp_path / name / "step-7" / "pytorch_model.bin").stat().st_size for name in ("young", "settled")]
    assert young["name"] == "Refused"
    assert "settle" in young["message"]
    assert sizes[0] > 1_600_000
    assert settled["type"] == "COMPLETED"
    assert sizes[1] < 3000
    published = load_file(tmp_path / "models" / "settled" / "step-7" / "model.safetensors")
    assert torch.equal(published["w"], buffer[1000:1100].view(10, 10).bfloat16())
