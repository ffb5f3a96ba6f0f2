"""``ckptflow run --no-local-copy`` against a real Prefect server and a real S3 server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from checkpoints import write_fsdp_step
from flowcases import objects_at
from flowruns import FlowLab, finish
from publishing import contents_of
from servers.proxy import DROP, Answer, Request, running_proxy
from servers.seaweed import S3Server

pytestmark = pytest.mark.service

OPTIONS = ("--no-local-copy", "--max-shard-size", "20KB")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_fsdp_step(tmp_path / f"streamed-{os.urandom(3).hex()}", 10)


@pytest.fixture(scope="module")
def uri(s3_bucket_name: str) -> str:
    return f"s3://{s3_bucket_name}/flow-{os.urandom(4).hex()}"


def test_a_run_streams_and_a_second_one_finds_the_model(
    lab: FlowLab, s3_server: S3Server, checkpoint: Path, uri: str, tmp_path: Path
) -> None:
    run = checkpoint.parent.name
    first = lab.run(checkpoint, uri, *OPTIONS)
    assert first.status == 0, first.stderr
    command = [sys.executable, "-m", "ckptflow.cli", "convert", str(checkpoint), str(tmp_path / "out")]
    subprocess.run([*command, "--max-shard-size", "20KB"], check=True)
    assert objects_at(s3_server, f"{uri}/{run}/step-10") == contents_of(tmp_path / "out")
    assert not (checkpoint.parent / ".ckptflow").exists()

    (flow_run,) = lab.runs(f"post-training {run} step-10")
    names = [task["name"].replace(f"{uri}/{run}/step-10", "DEST") for task in lab.task_runs(flow_run)]
    label = f"{run} step-10"
    files = len(list((tmp_path / "out").glob("*.safetensors")))
    assert files > 1
    begin = names.index(f"prepare DEST for {label}")
    assert names[begin + 1] == f"check replicas of {label}"
    streams = [f"stream {label} file {number} of {files} to DEST" for number in range(1, files + 1)]
    streams = [f"stream {label} to DEST", *streams]
    assert names[begin + 2 : begin + 5 + files] == [*streams, f"validate {label} at DEST", f"upload {label} to DEST"]
    artifacts = {artifact["key"]: artifact for artifact in lab.artifacts(flow_run)}
    rows = artifacts["merge"]["data"]
    assert [row["outcome"] for row in rows] == ["sent"] * files
    assert {"inspect", "shrink", "cast", "merge", "validate", "upload", "published-files"} <= set(artifacts)
    checks = {row["check"]: row["status"] for row in artifacts["validate"]["data"]}
    assert (checks["values"], checks["forward pass"], checks["sha256 of files"]) == ("passed", "passed", "passed")

    second = lab.run(checkpoint, uri, *OPTIONS)
    assert second.status == 0
    assert "already" in second.outcomes[0]["detail"]


def test_a_killed_run_goes_on_where_it_was(
    lab: FlowLab, s3_server: S3Server, checkpoint: Path, uri: str, tmp_path: Path
) -> None:
    count, lock, started = 0, threading.Lock(), threading.Event()
    process: list[subprocess.Popen[str]] = []

    def kill(request: Request) -> Answer | None:
        nonlocal count
        with lock:
            count += request.is_content
            if count < 3:
                return None
        started.wait()
        os.killpg(process[0].pid, signal.SIGKILL)
        return DROP

    options = (*OPTIONS, "--no-forward", "--work-dir", str(tmp_path / "work"))
    with running_proxy(s3_server.endpoint_url) as proxy:
        proxy.interfere = kill
        process.append(lab.start(checkpoint, uri, *options, AWS_ENDPOINT_URL=proxy.endpoint_url))
        started.set()
        assert finish(process[0]).status == -signal.SIGKILL
        proxy.interfere = None
        again = lab.run(checkpoint, uri, *options, AWS_ENDPOINT_URL=proxy.endpoint_url)
        assert again.status == 0, again.stderr
        assert [content for content, times in Counter(proxy.contents()).items() if times > 1] == []
    assert "ckptflow.json" in objects_at(s3_server, f"{uri}/{checkpoint.parent.name}/step-10")
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("destinations", "options", "told"),
    [
        (["file:///tmp/nowhere"], (), "one s3://BUCKET/PREFIX"),
        (["s3://a/b", "s3://a/c"], (), "2 destinations"),
        (["s3://a/b"], ("--keep-local",), "can't be kept and left out"),
    ],
)
def test_what_can_t_be_done_without_a_local_copy_is_wrong_usage(
    lab: FlowLab, checkpoint: Path, destinations: list[str], options: tuple[str, ...], told: str
) -> None:
    command = [sys.executable, "-m", "ckptflow.cli", "run", str(checkpoint), "--no-local-copy", *options]
    for destination in destinations:
        command += ["--to", destination]
    done = subprocess.run(command, env=lab.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert told in done.stderr
