"""The post-training flow against a real Prefect server and a real S3 server, as processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import TINY, WORLD_SIZE, write_fsdp_step
from ckptflow.formats.registry import locate
from ckptflow.locks import is_in_use
from flowruns import FlowLab, finish, flow_environment
from published_run import OPTIONS, RUN, WEIGHT_FILES, Published
from publishing import contents_of
from rank_writer import rank_name
from servers.proxy import Answer, Request, running_proxy
from servers.seaweed import SECRET_KEY, S3Server

pytestmark = pytest.mark.service

MANY_FILES = ("--max-shard-size", "3KB", "--no-forward")
WRONG_SECRET = "a-wrong-secret-that-nobody-may-read"


def converted(path: Path, out: Path, *options: str) -> dict[str, bytes]:
    """What ``ckptflow convert`` makes of the checkpoint."""
    subprocess.run([sys.executable, "-m", "ckptflow.cli", "convert", str(path), str(out), *options], check=True)
    return contents_of(out)


def objects_at(server: S3Server, uri: str) -> dict[str, bytes]:
    """All objects below a URI by name."""
    bucket, prefix = urlsplit(uri).netloc, urlsplit(uri).path.lstrip("/") + "/"
    client = server.client()
    listed = client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    found = {each["Key"]: client.get_object(Bucket=bucket, Key=each["Key"])["Body"].read() for each in listed}
    client.close()
    return {key.removeprefix(prefix): content for key, content in found.items()}


def without_record(contents: dict[str, bytes]) -> dict[str, bytes]:
    """All but ckptflow.json, which tells the seconds that the work took."""
    return {name: content for name, content in contents.items() if name != "ckptflow.json"}


def parameters(path: Path, uri: str, **destination: Any) -> dict[str, Any]:
    """Of the flow, without a forward pass."""
    return {
        "path": str(path),
        "destinations": [{"uri": uri, **destination}],
        "validation": {"forward": False},
        "recipe": {"max_shard_bytes": 20_000},
    }


# --- a checkpoint that is good


def test_a_checkpoint_is_published_with_the_bytes_that_convert_makes(
    published: Published, s3_server: S3Server, tmp_path: Path
) -> None:
    assert published.finished.status == 0, published.finished.stderr
    (outcome,) = published.finished.outcomes
    assert (outcome["state"], outcome["global_step"]) == ("published", 120)
    assert published.destination in outcome["detail"]
    expected = converted(published.path, tmp_path / "out", *OPTIONS)
    objects = objects_at(s3_server, published.destination)
    assert set(objects) == set(expected)
    assert without_record(objects) == without_record(expected)
    assert len([name for name in objects if name.endswith(".safetensors")]) == WEIGHT_FILES
    assert not (published.path.parent / ".ckptflow").exists(), "the local copy was removed"


def test_transformers_loads_what_was_published(published: Published, s3_server: S3Server, tmp_path: Path) -> None:
    for name, content in objects_at(s3_server, published.destination).items():
        (tmp_path / name).write_bytes(content)
    load = (
        "import sys, torch, transformers as t; m = t.AutoModelForCausalLM.from_pretrained(sys.argv[1]); "
        "k = t.AutoTokenizer.from_pretrained(sys.argv[1]); i = k('it is a truth', return_tensors='pt').input_ids; "
        "print(m.dtype, m.model.norm.weight.dtype, bool(torch.isfinite(m(i).logits).all()), i.tolist())"
    )
    command = [sys.executable, "-c", load, str(tmp_path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.split(" ", 3)
    assert said[:3] == ["torch.bfloat16", "torch.bfloat16", "True"]
    assert json.loads(said[3]) == [[3, 4, 5, 6]]


def test_the_names_and_tags_of_its_tasks_say_run_and_step(lab: FlowLab, published: Published) -> None:
    tasks = lab.task_runs(published.run)
    label = f"{RUN} step-120"
    files = [f"merge {label} file {number} of {WEIGHT_FILES}" for number in range(1, WEIGHT_FILES + 1)]
    before = [f"look for {label} at {published.uri}"]
    before += [f"{step} {label}" for step in ("inspect", "shrink", "cast", "check replicas of")]
    names = [task["name"] for task in tasks]
    assert names[:5] == before
    assert sorted(names[5 : 5 + WEIGHT_FILES]) == files
    after = [f"finish {label}", f"validate {label}", f"upload {label} to {published.uri}"]
    assert names[5 + WEIGHT_FILES :] == [*after, f"announce {label} at {published.uri}"]
    tags = {task["name"].split()[0]: set(task["tags"]) for task in tasks}
    # A tag without need costs a request, and often seconds.
    limited = {"check": {"gpu"}, "merge": {"gpu"}, "validate": {"gpu"}, "upload": {"upload"}}
    assert tags == {name: limited.get(name, set()) for name in tags}
    assert {task["state_name"] for task in tasks} == {"Completed"}


def test_each_step_waits_for_the_one_before_it_in_the_graph(lab: FlowLab, published: Published) -> None:
    nodes = lab.ask(f"flow_runs/{published.run['id']}/graph-v2")["nodes"]
    names = {node["id"]: node["label"].split()[0] for _, node in nodes}
    edges = {(names[parent["id"]], names[node["id"]]) for _, node in nodes for parent in node["parents"]}
    chain = ("inspect", "shrink", "cast", "check", "merge", "finish", "validate", "upload", "announce")
    assert set(pairwise(chain)) <= edges


def test_each_step_shows_what_it_found_or_did(lab: FlowLab, published: Published, s3_server: S3Server) -> None:
    artifacts = lab.artifacts(published.run)
    tables = {each["key"]: each["data"] for each in artifacts if each["type"] == "table"}
    facts = {row["what"]: row["value"] for row in tables["inspect"]}
    assert (facts["layout"], facts["ranks"], facts["device mesh"], facts["global step"]) == ("fsdp", 2, "2 (fsdp)", 120)
    assert facts["dtypes"].startswith("float32 ")
    assert facts["wasted storage bytes"] == "0 bytes"
    assert {"what", "before", "after", "saved"} == set(tables["shrink"][0])
    casts = {(row["from"], row["to"]): row["tensors"] for row in tables["cast"]}
    assert casts == {("float32", "bfloat16"): 56, ("float32", "float32"): 1}
    assert [row["tensor"] for row in tables["kept-dtypes"]] == ["lm_head.weight"]
    record = json.loads(objects_at(s3_server, published.destination)["ckptflow.json"])
    sums = {name: entry["sha256"] for name, entry in record["files"].items()}
    merged = {row["file"]: row["sha256"] for row in tables["merge"]}
    assert merged == {name: sha256 for name, sha256 in sums.items() if name.endswith(".safetensors")}
    assert {row["file"]: row["sha256"] for row in tables["published-files"]}.items() >= sums.items()
    assert all(row["proven by"] for row in tables["published-files"])
    (link,) = [each["data"] for each in artifacts if each["key"] == "upload"]
    assert published.destination in link


def test_progress_is_shown_for_each_file_and_for_the_upload(lab: FlowLab, published: Published) -> None:
    progress = [each for each in lab.artifacts(published.run) if each["type"] == "progress"]
    assert {each["data"] for each in progress} == {100.0}
    assert len(progress) == WEIGHT_FILES + 1
    assert all(re.search(r": [\d.]+ .B at [\d.]+ .?B/s$", each["description"]) for each in progress), progress


def test_validation_shows_its_checks_and_draws_the_rounding(lab: FlowLab, published: Published) -> None:
    artifacts = {each["key"]: each["data"] for each in lab.artifacts(published.run)}
    checks = {row["check"]: row for row in artifacts["validate"]}
    assert {checks[name]["status"] for name in ("values", "forward pass", "sha256 of files")} == {"passed"}
    assert "elements" in checks["values"]["figures"]
    picture = artifacts["validate-picture"]
    assert f"{RUN} step-120: validation passed" in picture
    assert picture.count("```mermaid") == 2
    assert '"bfloat16, ' in picture
    assert '"float32, ' in picture
    (bars,) = [line for line in picture.splitlines() if line.strip().startswith("bar [")]
    assert len(json.loads(bars.replace("bar ", ""))) <= 10


def test_tasks_hand_on_small_records_and_leave_nothing_on_disk(lab: FlowLab, published: Published) -> None:
    sizes = [len(json.dumps(task["state"])) for task in lab.task_runs(published.run)]
    assert max(sizes) < 4000
    assert published.stored == frozenset()
    assert not any(SECRET_KEY in text for text in everything_about(lab, published.run))


def test_the_form_of_the_parameters_explains_each_field(lab: FlowLab) -> None:
    show = (
        "import json; from prefect.utilities.callables import parameter_schema; "
        "from ckptflow_flows.post_training import post_training as f; "
        "print(json.dumps([f.description, parameter_schema(f).model_dump()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", show], check=True, capture_output=True, text=True, env=dict(lab.environment)
    )
    description, schema = json.loads(done.stdout)
    assert description.startswith("Turn one checkpoint into a published model")
    assert schema["properties"]["checkpoint"]["description"].startswith("which checkpoint")
    fields = {
        f"{model}.{name}": field
        for model, definition in schema["definitions"].items()
        for name, field in definition["properties"].items()
    }
    assert {"PostTraining.path", "Recipe.dtype", "Destination.uri", "Machine.threads", "Validation.forward"} <= set(
        fields
    )
    plain = {name: field for name, field in fields.items() if "$ref" not in json.dumps(field)}
    assert [name for name, field in plain.items() if not field.get("title")] == []
    assert [name for name, field in plain.items() if len(field.get("description", "")) < 20] == []


def test_a_second_run_finds_the_model_and_does_nothing(lab: FlowLab, published: Published, s3_server: S3Server) -> None:
    before = objects_at(s3_server, published.destination)
    finished = lab.run(published.path, published.uri, *OPTIONS)
    assert finished.status == 0
    assert finished.outcomes[0]["state"] == "published"
    run = lab.runs(f"post-training {RUN} step-120")[-1]
    assert (run["state_type"], run["state_name"]) == ("COMPLETED", "AlreadyPublished")
    assert [task["name"] for task in lab.task_runs(run)] == [f"look for {RUN} step-120 at {published.uri}"]
    assert objects_at(s3_server, published.destination) == before


def test_without_a_server_it_brings_its_own_and_publishes_to_a_directory(s3_server: S3Server, tmp_path: Path) -> None:
    path = write_fsdp_step(tmp_path / "alone", 10)
    env = flow_environment(None, tmp_path / "home", s3_server.environment())
    command = [sys.executable, "-m", "ckptflow.cli", "run", str(path), "--to", (tmp_path / "models").as_uri(), "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["state"] == "published"
    published = contents_of(tmp_path / "models" / "alone" / "step-10")
    assert without_record(published) == without_record(converted(path, tmp_path / "out"))
    assert "Traceback" not in done.stderr


# --- a checkpoint that is bad, and a machine that is


def first_nan(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed[3, 5] = float("nan")
    return changed


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


def test_a_file_with_nan_stops_the_files_beside_it(lab: FlowLab, tmp_path: Path) -> None:
    path = write_fsdp_step(tmp_path / "first-bad", changes={"model.embed_tokens.weight": first_nan})
    case = parameters(path, (tmp_path / "models").as_uri())
    case["recipe"]["max_shard_bytes"] = 3000
    (state,) = lab.run_flows({"parameters": case}, CKPTFLOW_FILES_AT_ONCE="1")
    assert state["name"] == "Refused"
    assert "NaN" in state["message"]
    (run,) = lab.runs("post-training first-bad step-10")
    merges = [task["state_name"] for task in lab.task_runs(run) if task["name"].startswith("merge ")]
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


def everything_about(lab: FlowLab, run: Any) -> Iterator[str]:
    """All that the server tells of a run, and the server's whole database."""
    yield json.dumps([run, lab.task_runs(run), lab.artifacts(run), lab.logs(run)])
    for path in lab.server.home.glob("prefect.db*"):
        yield path.read_bytes().decode("latin-1")


@pytest.mark.parametrize(
    ("field", "value"),
    [("uri", "s3://AKIA:hunter2@bucket/models"), ("endpoint_url", "http://AKIA:hunter2@127.0.0.1:9000")],
)
def test_a_password_in_an_address_is_refused_before_it_reaches_the_server(
    lab: FlowLab, tmp_path: Path, field: str, value: str
) -> None:
    case = parameters(tmp_path, "s3://bucket/models")
    case["destinations"][0][field] = value
    command = [sys.executable, str(Path(__file__).with_name("flow_process.py"))]
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


# --- two at once, and runs that are killed


def test_two_runs_at_once_make_one_model_and_both_complete(lab: FlowLab, tmp_path: Path) -> None:
    path = write_fsdp_step(tmp_path / "twice")
    uri = (tmp_path / "models").as_uri()
    both = [lab.start(path, uri, *MANY_FILES) for _ in range(2)]
    finished = [finish(each) for each in both]
    assert [each.status for each in finished] == [0, 0], [each.stderr for each in finished]
    runs = lab.runs("post-training twice step-10")
    assert sorted(run["state_name"] for run in runs) == ["AlreadyPublished", "Completed"]
    assert {run["state_type"] for run in runs} == {"COMPLETED"}
    merges = [task for run in runs for task in lab.task_runs(run) if task["name"].startswith("merge ")]
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


def wait_for(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    """Poll until it is so."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.002)


def kill(process: subprocess.Popen[str]) -> None:
    """``kill -9`` the process and its children."""
    os.killpg(process.pid, signal.SIGKILL)
    finish_killed(process)


def finish_killed(process: subprocess.Popen[str]) -> None:
    """Wait for a process that gets a signal."""
    process.communicate(timeout=100)
    assert process.returncode == -signal.SIGKILL


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


def written_files(work: Path) -> dict[str, tuple[int, int]]:
    """Name → inode and mtime of each weight file that has its final name."""
    found = [each for each in work.rglob("model-*.safetensors") if not each.name.startswith(".")]
    return {each.name: (each.stat().st_ino, each.stat().st_mtime_ns) for each in found}


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


# --- timeouts


@contextmanager
def one_gpu(lab: FlowLab) -> Iterator[None]:
    """A limit of one on the tag ``gpu``."""
    lab.ask("concurrency_limits/", {"tag": "gpu", "concurrency_limit": 1})
    try:
        yield
    finally:
        limit = lab.ask("v2/concurrency_limits/filter", {})
        lab_delete(lab, limit[0]["id"])


def lab_delete(lab: FlowLab, identifier: str) -> None:
    import urllib.request

    url = f"{lab.server.api_url}/v2/concurrency_limits/{identifier}"
    urllib.request.urlopen(urllib.request.Request(url, method="DELETE"), timeout=30).close()


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
    states = [task["state_name"] for task in lab.task_runs(late_run) if task["name"].startswith("merge ")]
    assert states
    assert set(states) <= {"TimedOut", "Cancelled"}
    merges = [task for task in lab.task_runs(good_run) if task["name"].startswith("merge ")]
    ends = [task["end_time"] for task in merges]
    assert all(task["start_time"] >= end for task, end in zip(merges[1:], ends, strict=False)), "one at a time"


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
