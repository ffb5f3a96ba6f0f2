"""What post-training makes of a good checkpoint, on a real Prefect server and a real S3 server."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from checkpoints import write_fsdp_step
from flowcases import converted, everything_about, objects_at, without_record
from flowruns import FlowLab, flow_environment
from published_run import OPTIONS, RUN, WEIGHT_FILES, Published
from publishing import contents_of
from servers.prefect_database import put_migrated_database
from servers.seaweed import SECRET_KEY, S3Server

pytestmark = pytest.mark.service


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
    before = [f"look for {label} at {published.uri}", f"inspect {label}", f"ask {published.uri} about {label}"]
    before += [f"{step} {label}" for step in ("shrink", "cast", "check replicas of", "merge")]
    names = [task["name"] for task in tasks]
    assert names[:7] == before
    assert sorted(names[7 : 7 + WEIGHT_FILES]) == files
    after = [f"finish {label}", f"validate {label}", f"upload {label} to {published.uri}"]
    assert names[7 + WEIGHT_FILES :] == [*after, f"announce {label} at {published.uri}"]
    tags = {task["name"].split()[0]: set(task["tags"]) for task in tasks if task["name"] not in files}
    # A tag without need costs a request, and often seconds.
    limited = {"merge": {"gpu"}, "validate": {"gpu"}}
    assert tags == {name: limited.get(name, set()) for name in tags}
    assert not any(task["tags"] for task in tasks if task["name"] in files), "the merge has a slot for all of them"
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
    put_migrated_database(tmp_path / "home")
    env = flow_environment(None, tmp_path / "home", s3_server.environment())
    command = [sys.executable, "-m", "ckptflow.cli", "run", str(path), "--to", (tmp_path / "models").as_uri(), "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["state"] == "published"
    published = contents_of(tmp_path / "models" / "alone" / "step-10")
    assert without_record(published) == without_record(converted(path, tmp_path / "out"))
    assert "Traceback" not in done.stderr
