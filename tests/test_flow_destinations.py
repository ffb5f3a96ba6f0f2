"""Several destinations in one run, the event that says that a model is published, and credentials out of blocks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from checkpoints import write_fsdp_step
from flowcases import everything_about, objects_at, without_record
from flowruns import FlowLab
from publishing import contents_of
from servers.hub import TOKEN, Fault, Hub, running_hub
from servers.seaweed import ACCESS_KEY, SECRET_KEY, S3Server

pytestmark = pytest.mark.service

PUBLISHED = "ckptflow.checkpoint.published"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with running_hub(tmp_path_factory.mktemp("hub")) as running:
        yield running


def on_line(hub: Hub) -> dict[str, str]:
    """What a process reads that may speak to the Hub."""
    return {**hub.environment(), "HF_HUB_OFFLINE": "0"}


def parameters(path: Path, *destinations: str | Mapping[str, Any]) -> dict[str, Any]:
    """Of the flow, without a forward pass."""
    return {
        "path": str(path),
        "destinations": [{"uri": each} if isinstance(each, str) else each for each in destinations],
        "validation": {"forward": False},
    }


def tasks_of(lab: FlowLab, run: Mapping[str, Any]) -> dict[str, str]:
    """Names and states of a run's tasks, without the label."""
    return {task["name"].split("/")[0]: task["state_name"] for task in lab.task_runs(run)}


def published_events(lab: FlowLab, path: Path, expected: int) -> list[dict[str, Any]]:
    """The events about one checkpoint; the server stores them in batches."""
    query = {
        "resource": {"id_prefix": [f"ckptflow.checkpoint.{path}"]},
        "event": {"name": [PUBLISHED]},
        "occurred": {"since": "2000-01-01T00:00:00Z"},
    }
    deadline = time.monotonic() + 120
    while True:
        found: list[dict[str, Any]] = lab.ask("events/filter", {"filter": query, "limit": 50})["events"]
        if len(found) >= expected or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


# --- several destinations


def test_a_destination_that_fails_keeps_the_model_from_no_other_and_is_all_that_the_next_run_does(
    lab: FlowLab, hub: Hub, s3_server: S3Server, s3_bucket_name: str, tmp_path: Path
) -> None:
    path = write_fsdp_step(tmp_path / "three-places")
    s3, directory, repo = f"s3://{s3_bucket_name}/of-three", (tmp_path / "models").as_uri(), "hf://tester/three"
    case = {"parameters": parameters(path, {"uri": repo, "attempts": 1}, s3, directory)}
    hub.interfere = lambda request: Fault(status=503) if "/commit/" in request.path else None
    try:
        (partly,) = lab.run_flows(case, **on_line(hub), CKPTFLOW_RETRIES="0")
    finally:
        hub.interfere = None
    assert (partly["type"], partly["name"]) == ("FAILED", "Failed")
    assert "three-places step-10 is not published at hf://tester/three@three-places/step-10 (" in partly["message"]
    assert f"; it is published at {s3}/three-places/step-10, {directory}/three-places/step-10" in partly["message"]
    local = contents_of(tmp_path / "models" / "three-places" / "step-10")
    assert objects_at(s3_server, f"{s3}/three-places/step-10") == local
    assert len(published_events(lab, path, 2)) == 2

    (whole, again) = lab.run_flows(case, case, **on_line(hub))
    assert whole["name"] == "Completed"
    assert again["name"] == "AlreadyPublished"
    commit = hub.repos["tester/three"].branches["three-places/step-10"]
    assert commit.files["ckptflow.json"]
    assert contents_of(tmp_path / "models" / "three-places" / "step-10") == local
    first, second, third = lab.runs("post-training three-places step-10")
    uploads = [
        [task["name"].rpartition(" to ")[2] for task in lab.task_runs(run) if task["name"].startswith("upload ")]
        for run in (first, second, third)
    ]
    assert uploads == [[repo, s3, directory], [repo], []]
    steps = {task["name"].split()[0] for task in lab.task_runs(second)}
    assert not steps & {"merge", "validate"}, "the model that was proven is at hand still"
    assert [task["name"].split()[0] for task in lab.task_runs(third)] == ["look", "look", "look"]
    assert not (path.parent / ".ckptflow").exists()
    events = published_events(lab, path, 3)
    assert sorted(event["payload"]["destination"].partition(":")[0] for event in events) == ["file", "hf", "s3"]


def test_a_destination_that_cannot_be_asked_fails_alone(lab: FlowLab, tmp_path: Path) -> None:
    path = write_fsdp_step(tmp_path / "one-away")
    away = {"uri": "s3://no-such-place/models", "endpoint_url": "http://127.0.0.1:9", "attempts": 1}
    (state,) = lab.run_flows(
        {"parameters": parameters(path, away, (tmp_path / "models").as_uri())}, CKPTFLOW_RETRIES="0"
    )
    assert state["name"] == "Failed"
    assert "is not published at s3://no-such-place/models/one-away/step-10 (" in state["message"]
    assert (tmp_path / "models" / "one-away" / "step-10" / "ckptflow.json").is_file()


def test_another_model_at_its_destination_is_refused_once_and_replaced_where_that_is_asked_for(
    lab: FlowLab, tmp_path: Path
) -> None:
    path = write_fsdp_step(tmp_path / "written-twice")
    places = [(tmp_path / name).as_uri() for name in ("a", "b")]
    marker = tmp_path / "a" / "written-twice" / "step-10" / "ckptflow.json"
    (first,) = lab.run_flows({"parameters": parameters(path, places[0])})
    assert first["name"] == "Completed"
    before = marker.read_bytes()
    shutil.rmtree(path)
    # Training went on from an earlier step, and came by once more.
    write_fsdp_step(path.parent, changes={"model.norm.weight": lambda values: values + 1})
    there, anew = places[0], {"uri": places[0], "overwrite": True}
    alone, of_two, replaced = lab.run_flows(
        *({"parameters": parameters(path, *to)} for to in ([there], [there, places[1]], [anew, places[1]]))
    )
    assert (alone["type"], alone["name"]) == (of_two["type"], of_two["name"]) == ("FAILED", "Refused")
    assert "the destination holds another model" in alone["message"]
    assert f"it is published at {places[1]}" in of_two["message"]
    work_of_alone = tasks_of(lab, lab.runs("post-training written-twice step-10")[1])
    assert [name.split()[0] for name in work_of_alone] == ["look", "inspect", "ask"], "refused before the work"
    assert replaced["name"] == "Completed"
    assert marker.read_bytes() != before
    assert not (path.parent / ".ckptflow").exists()


def test_the_command_line_takes_several_and_says_what_became_of_them(lab: FlowLab, tmp_path: Path) -> None:
    path = write_fsdp_step(tmp_path / "by-command")
    places = [(tmp_path / name).as_uri() for name in ("a", "b")]
    finished = lab.run(path, places[0], "--to", f"{places[1]},verify=full,attempts=2", "--no-forward")
    assert finished.status == 0, finished.stderr
    detail = finished.outcomes[0]["detail"]
    assert detail == "by-command step-10 is published at " + ", ".join(f"{p}/by-command/step-10" for p in places)
    first, second = (contents_of(tmp_path / name / "by-command" / "step-10") for name in ("a", "b"))
    assert first == second
    detect = [sys.executable, "-m", "ckptflow.cli", "detect", str(path), "--settle", "0", "--json"]
    states = []
    for options in (("--to", places[0], "--to", places[1]), ("--to", places[0], "--to", (tmp_path / "c").as_uri())):
        done = subprocess.run([*detect, *options], check=True, capture_output=True, text=True)
        states.append(json.loads(done.stdout)[0]["state"])
    assert states == ["published", "complete"]


# --- the event


def test_the_event_says_what_is_published_where_and_comes_once(lab: FlowLab, tmp_path: Path) -> None:
    path = write_fsdp_step(tmp_path / "told")
    models = tmp_path / "models" / "told" / "step-10"
    lab.run_flows({"parameters": parameters(path, (tmp_path / "models").as_uri())})
    (run,) = lab.runs("post-training told step-10")
    # A run that was killed when all was there, before it could say so and clean up.
    (path.parent / ".ckptflow").mkdir()
    (path.parent / ".ckptflow" / ".told-step-10.lock").touch()
    lab.run_flows(*[{"parameters": parameters(path, (tmp_path / "models").as_uri())}] * 2)
    tasks = [[task["name"].split()[0] for task in lab.task_runs(run)] for run in lab.runs("post-training told step-10")]
    assert tasks[1:] == [["look", "announce"], ["look"]]
    (event,) = published_events(lab, path, 1)
    record = json.loads((models / "ckptflow.json").read_text())
    assert event["resource"]["prefect.resource.id"] == f"ckptflow.checkpoint.{path / 'actor'}"
    assert event["resource"]["ckptflow.destination"] == models.as_uri()
    assert event["payload"] == {
        "path": str(path / "actor"),
        "global_step": 10,
        "layout": "fsdp",
        "role": "actor",
        "destination": models.as_uri(),
        "revision": None,
        "fingerprint": record["fingerprint"],
        "bytes": sum(len(content) for content in contents_of(models).values()),
        "files": len(contents_of(models)),
    }
    related = {each["prefect.resource.role"]: each["prefect.resource.id"] for each in event["related"]}
    assert related["flow-run"] == f"prefect.flow-run.{run['id']}"


# --- credentials


MAKE_BLOCKS = """
import json, sys
from prefect.blocks.core import Block
from prefect.blocks.system import Secret
from pydantic import SecretStr

class AwsCredentials(Block):
    # The fields of the block type of that name in prefect-aws.
    _block_type_slug = "aws-credentials"
    aws_access_key_id: str | None = None
    aws_secret_access_key: SecretStr | None = None
    aws_session_token: str | None = None
    profile_name: str | None = None
    region_name: str | None = None
    aws_client_parameters: dict = {}

key, secret, token = json.load(sys.stdin)
Secret(value=token).save("hub-token", overwrite=True)
Secret(value={"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}).save("s3-keys", overwrite=True)
AwsCredentials(aws_access_key_id=key, aws_secret_access_key=secret, region_name="us-east-1").save("s3", overwrite=True)
AwsCredentials(aws_access_key_id=key, profile_name="p").save("s3-profile", overwrite=True)
Secret(value=json.dumps({"aws_key": secret})).save("misnamed", overwrite=True)
"""


@pytest.fixture(scope="module")
def blocks(lab: FlowLab) -> None:
    """Blocks on the server that hold what the servers ask for."""
    subprocess.run(
        [sys.executable, "-c", MAKE_BLOCKS],
        input=json.dumps([ACCESS_KEY, SECRET_KEY, TOKEN]),
        env=dict(lab.environment),
        text=True,
        check=True,
        capture_output=True,
        timeout=120,
    )


def without_credentials(lab: FlowLab, hub: Hub) -> FlowLab:
    """A lab whose processes have no credentials of their own."""
    environment = {**lab.environment, **on_line(hub)}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        del environment[name]
    return FlowLab(server=lab.server, environment=environment)


@pytest.mark.usefixtures("blocks")
def test_credentials_come_from_blocks_and_are_told_to_nobody(
    lab: FlowLab, hub: Hub, s3_server: S3Server, s3_bucket_name: str, tmp_path: Path
) -> None:
    bare = without_credentials(lab, hub)
    path = write_fsdp_step(tmp_path / "by-block")
    s3 = f"s3://{s3_bucket_name}/by-block"
    destinations = [
        {"uri": s3, "credentials_block": "aws-credentials/s3"},
        {"uri": f"{s3}-too", "credentials_block": "secret/s3-keys"},
        {"uri": "hf://tester/by-block", "credentials_block": "secret/hub-token"},
    ]
    good, *bad = bare.run_flows(
        {"parameters": parameters(path, *destinations)},
        {"parameters": parameters(path, {"uri": f"{s3}-3", "credentials_block": "secret/nobody-made-it"})},
        {"parameters": parameters(path, {"uri": f"{s3}-4", "credentials_block": "secret/misnamed"})},
        {"parameters": parameters(path, {"uri": f"{s3}-5", "credentials_block": "secret/hub-token"})},
        {"parameters": parameters(path, {"uri": f"{s3}-6", "credentials_block": "aws-credentials/s3-profile"})},
        {"parameters": parameters(path, {"uri": f"{s3}-7"})},
        CKPTFLOW_RETRIES="0",
    )
    assert good["name"] == "Completed", good
    objects = objects_at(s3_server, f"{s3}/by-block/step-10")
    assert without_record(objects_at(s3_server, f"{s3}-too/by-block/step-10")) == without_record(objects)
    assert "ckptflow.json" in hub.repos["tester/by-block"].branches["by-block/step-10"].files
    assert [state["name"] for state in bad] == ["Failed"] * 5
    reasons = [state["message"] for state in bad]
    assert "no such credentials block" in reasons[0]
    assert "these are no credentials" in reasons[1]
    assert "hold no AWS keys" in reasons[2]
    assert "profile_name" in reasons[3]
    for run in lab.runs("post-training by-block step-10"):
        told = [json.dumps([run, lab.task_runs(run), lab.artifacts(run), lab.logs(run)])]
        assert not any(secret in text for secret in (SECRET_KEY, ACCESS_KEY, TOKEN) for text in told)
    # The server keeps blocks encrypted, so that its whole database holds none of them either.
    everything = list(everything_about(lab, run))
    assert not any(secret in text for secret in (SECRET_KEY, TOKEN) for text in everything)
