"""Runs of post-training that meet, are killed, or are told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import write_fsdp_step
from ckptflow.files.locks import is_in_use
from ckptflow.formats.registry import locate
from flowcases import MANY_FILES, converted, finish_killed, kill, objects_at, wait_for, without_record, written_files
from flowruns import FlowLab, finish
from publishing import contents_of
from servers.proxy import Answer, Request, running_proxy
from servers.seaweed import S3Server

pytestmark = pytest.mark.service


def test_two_runs_at_once_make_one_model_and_both_complete(lab: FlowLab, tmp_path: Path) -> None:
    path = write_fsdp_step(tmp_path / "twice")
    uri = (tmp_path / "models").as_uri()
    both = [lab.start(path, uri, *MANY_FILES) for _ in range(2)]
    finished = [finish(each) for each in both]
    assert [each.status for each in finished] == [0, 0], [each.stderr for each in finished]
    runs = lab.runs("post-training twice step-10")
    assert sorted(run["state_name"] for run in runs) == ["AlreadyPublished", "Completed"]
    assert {run["state_type"] for run in runs} == {"COMPLETED"}
    merges = [task for run in runs for task in lab.file_runs(run)]
    assert len(merges) == len({task["name"] for task in merges})
    assert without_record(contents_of(tmp_path / "models" / "twice" / "step-10")) == without_record(
        converted(path, tmp_path / "out", *MANY_FILES[:2])
    )


def test_a_run_killed_in_the_merge_and_again_in_the_upload_is_finished_without_doing_files_twice(
    lab: FlowLab, s3_server: S3Server, s3_bucket_name: str, tmp_path: Path
) -> None:
    path, uri = write_fsdp_step(tmp_path / "killed"), f"s3://{s3_bucket_name}/killed"
    work = tmp_path / "work"
    options = (*MANY_FILES, "--work-dir", str(work), "--keep-local")

    first = lab.start(path, uri, *options)
    wait_for(lambda: any(work.rglob("*.records/*.json")))
    kill(first)
    recorded = {each.stem for each in work.rglob("*.records/*.json")}
    finished = {name: facts for name, facts in written_files(work).items() if name in recorded}
    total = len(converted(path, tmp_path / "out", *MANY_FILES[:2]))
    assert 0 < len(finished) < total / 2
    assert not (work / "killed-step-10").exists(), "nothing looks finished"

    with running_proxy(s3_server.endpoint_url) as proxy:
        second = lab.start(path, uri, *options, AWS_ENDPOINT_URL=proxy.endpoint_url)
        proxy.interfere = kill_at_file(5, second)
        finish_killed(second)
        proxy.interfere = None
        assert written_files(work).items() >= finished.items(), "finished files were not written again"
        assert "ckptflow.json" not in objects_at(s3_server, f"{uri}/killed/step-10")
        third = lab.run(path, uri, *options, AWS_ENDPOINT_URL=proxy.endpoint_url)
    assert third.status == 0, third.stderr
    sent = [key for key, _ in proxy.contents()]
    assert len(sent) == len(set(sent)) == total
    assert written_files(work).items() >= finished.items()
    published = objects_at(s3_server, f"{uri}/killed/step-10")
    assert without_record(published) == without_record(contents_of(tmp_path / "out"))
    assert published["ckptflow.json"] == (work / "killed-step-10" / "ckptflow.json").read_bytes()
    runs = lab.runs("post-training killed step-10")
    assert [run["state_name"] for run in runs] == ["Crashed", "Crashed", "Completed"], "none is Running for ever"
    assert {tuple(run["tags"]) for run in runs} == {("ckptflow",)}, "the automation that misses heartbeats sees them"


def kill_at_file(number: int, process: subprocess.Popen[str]) -> Callable[[Request], Answer | None]:
    """Kills the process when it is about to send its ``number``-th content."""
    seen = []

    def interfere(request: Request) -> Answer | None:
        if request.is_content:
            seen.append(request.key)
        if len(seen) < number:
            return None
        os.killpg(process.pid, signal.SIGKILL)
        return Answer(status=503)

    return interfere


def test_a_run_that_is_told_to_end_leaves_its_finished_files_for_the_next(lab: FlowLab, tmp_path: Path) -> None:
    path, work = write_fsdp_step(tmp_path / "ended"), tmp_path / "work"
    options = (*MANY_FILES, "--work-dir", str(work))
    process = lab.start(path, (tmp_path / "models").as_uri(), *options)
    wait_for(lambda: any(work.rglob("*.records/*.json")))
    assert is_in_use(locate(path).path), "retain leaves the step alone, wherever the work is done"
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert time.monotonic() - begin < 20
    assert not is_in_use(locate(path).path)
    assert process.returncode != 0
    assert written_files(work)
    assert not (work / "ended-step-10").exists()
    (run,) = lab.runs("post-training ended step-10")
    assert run["state_name"] in ("Crashed", "Cancelled")
