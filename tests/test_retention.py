"""Retention on real checkpoints with models published for real, against trainers, kills and read-only disks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from checkpoints import write_fsdp_step
from ckptflow.cli import main
from ckptflow.conversion import Conversion
from ckptflow.convert import convert
from ckptflow.discover import discover
from ckptflow.errors import CheckpointError, PublishError, UsageError
from ckptflow.formats.registry import locate
from ckptflow.locks import exclusive
from ckptflow.publish import Destination, PublishSettings
from ckptflow.request import ConvertRequest
from ckptflow.retention import Decision, KeepBest, RetentionPolicy, RetentionRequest, plan_root, retain
from ckptflow.retention.metrics import file_metrics
from ckptflow.retention.removal import SUFFIX, carry_out
from ckptflow_flows.settings import Machine
from ckptflow_flows.workplace import Workplace
from retained import age, names_in, publish
from servers.hub import running_hub
from servers.seaweed import S3Server
from test_discover import hf_step

STEPS = (8, 9, 10, 11)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``runs/sft`` with four whole steps of two ranks and an optimizer each, all published under ``models``."""
    base = tmp_path_factory.mktemp("template")
    for step in STEPS:
        directory = write_fsdp_step(base / "runs" / "sft", step)
        (directory / "actor" / "optim_world_size_2_rank_0.pt").write_bytes(bytes(50_000))
        publish(directory, f"file://{base}/models", base / "scratch")
    age(base / "runs")
    return base


@pytest.fixture
def base(template: Path, tmp_path: Path) -> Path:
    """A copy of the template of the test's own."""
    for name in ("runs", "models"):
        shutil.copytree(template / name, tmp_path / name)
    return tmp_path


def request(base: Path, **policy: object) -> RetentionRequest:
    return RetentionRequest(
        root=base / "runs",
        policy=RetentionPolicy(**{"keep_newest": 1, **policy}),  # type: ignore[arg-type]
        destinations=(Destination(uri=f"file://{base}/models"),),
    )


def planned(base: Path, **policy: object) -> dict[int | None, Decision]:
    return {decision.global_step: decision for decision in plan_root(request(base, **policy))}


def doomed(base: Path, **policy: object) -> list[int | None]:
    return [step for step, decision in planned(base, **policy).items() if decision.action == "delete"]


def why(base: Path, step: int) -> str:
    return "; ".join(planned(base)[step].reasons)


def command(base: Path, *options: str) -> list[str]:
    return ["retain", str(base / "runs"), "--keep", "1", "--to", f"file://{base}/models", *options]


# --- what goes and what stays


def test_published_steps_go_and_the_newest_stays(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = shutil.disk_usage(base).free
    assert main(command(base, "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert names_in(base / "runs" / "sft") == {"global_step_11"}
    assert {each["global_step"]: each["action"] for each in document["decisions"]} == {
        8: "delete",
        9: "delete",
        10: "delete",
        11: "keep",
    }
    assert document["freed_bytes"] == document["would_free_bytes"] > 3 * 50_000
    assert [each["outcome"] for each in document["removals"]] == ["deleted"] * 3
    assert before > 0
    assert next(discover([base / "runs"])).state == "complete"


def test_a_dry_run_prints_the_same_decisions_and_deletes_nothing(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(base, "--dry-run", "--json")) == 0
    dry = json.loads(capsys.readouterr().out)
    assert dry["removals"] == []
    assert main(command(base, "--dry-run")) == 0
    printed = capsys.readouterr().out
    assert "3 of 4 steps would go" in printed
    assert str(base / "runs" / "sft" / "global_step_8") in printed
    assert len(names_in(base / "runs" / "sft")) == 4
    assert main(command(base, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["decisions"] == dry["decisions"]


@pytest.mark.parametrize("number", ["0", "-1"])
def test_keeping_none_or_minus_one_is_refused(base: Path, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(base)
    arguments[arguments.index("--keep") + 1] = number
    assert main(arguments) == 2
    assert "not a positive number" in capsys.readouterr().err
    assert len(names_in(base / "runs" / "sft")) == 4


def test_options_of_the_command_reach_the_policy(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = base / "eval.json"
    metrics.write_text(json.dumps({"8": {"acc": 0.9}, "9": {"acc": 0.1}, "10": {"acc": 0.2}, "11": {"acc": 0.3}}))
    best = ("--best", "1", "--metric", "acc", "--mode", "max", "--metric-file", str(metrics))
    assert main(command(base, "--every", "5", "--pin", "global_step_1[1-9]", *best)) == 0
    assert "deleted" in capsys.readouterr().out
    assert names_in(base / "runs" / "sft") == {"global_step_8", "global_step_10", "global_step_11"}


@pytest.mark.parametrize("options", [("--best", "1"), ("--metric", "acc"), ("--best", "1", "--metric", "acc")])
def test_half_a_rule_about_the_best_is_refused(base: Path, options: tuple[str, ...]) -> None:
    assert main(command(base, *options)) == 2
    assert len(names_in(base / "runs" / "sft")) == 4


def test_a_step_that_was_never_published_stays(base: Path) -> None:
    shutil.rmtree(base / "models" / "sft" / "step-9")
    assert doomed(base) == [8, 10]
    assert "no marker" in why(base, 9)


def test_a_marker_of_other_weights_proves_nothing(base: Path) -> None:
    write_fsdp_step(base / "other" / "sft", 77)
    for rank in (0, 1):
        name = f"actor/model_world_size_2_rank_{rank}.pt"
        shutil.copyfile(
            base / "other" / "sft" / "global_step_77" / name, base / "runs" / "sft" / "global_step_9" / name
        )
    age(base / "runs")
    assert doomed(base) == [8, 10]


def test_a_marker_whose_weight_file_was_deleted_proves_nothing(base: Path) -> None:
    (base / "models" / "sft" / "step-9" / "model.safetensors").unlink()
    assert doomed(base) == [8, 10]
    assert "model.safetensors is gone" in why(base, 9)


def test_all_roles_of_a_step_must_be_published(base: Path) -> None:
    step = base / "runs" / "sft" / "global_step_9"
    shutil.copytree(step / "actor", step / "critic")
    age(base / "runs")
    assert doomed(base) == [8, 10]
    assert "critic: no marker" in why(base, 9)
    publish(step, f"file://{base}/models2", base / "scratch")
    shutil.copytree(base / "models2" / "sft" / "step-9" / "critic", base / "models" / "sft" / "step-9" / "critic")
    age(base / "runs")
    assert doomed(base) == [8, 9, 10]


def test_every_destination_that_is_named_must_have_it(base: Path) -> None:
    publish(base / "runs" / "sft" / "global_step_10", f"file://{base}/second", base / "scratch")
    age(base / "runs")
    both = RetentionRequest(
        root=base / "runs",
        policy=RetentionPolicy(keep_newest=1),
        destinations=(Destination(uri=f"file://{base}/models"), Destination(uri=f"file://{base}/second")),
    )
    assert [d.global_step for d in plan_root(both) if d.action == "delete"] == [10]


def test_a_destination_inside_the_step_does_not_count(base: Path) -> None:
    step = base / "runs" / "sft" / "global_step_9"
    inside = f"file://{step}/published"
    publish(step, inside, base / "scratch")
    age(base / "runs")
    only = RetentionRequest(
        root=base / "runs", policy=RetentionPolicy(keep_newest=1), destinations=(Destination(uri=inside),)
    )
    decisions = {d.global_step: d for d in plan_root(only)}
    assert decisions[9].action == "keep"
    assert "lies inside it" in "; ".join(decisions[9].reasons)


def test_without_a_destination_nothing_is_decided(base: Path) -> None:
    with pytest.raises(UsageError, match="needs a destination"):
        plan_root(RetentionRequest(root=base / "runs", policy=RetentionPolicy(), destinations=()))


@pytest.mark.service
def test_what_is_published_to_s3_may_go_and_what_is_not_stays(
    base: Path, s3_server: S3Server, s3_bucket_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    uri = f"s3://{s3_bucket_name}/retention-{os.getpid()}"
    publish(base / "runs" / "sft" / "global_step_9", uri, base / "scratch")
    age(base / "runs")
    assert main(["retain", str(base / "runs"), "--keep", "1", "--to", uri]) == 0
    assert names_in(base / "runs" / "sft") == {"global_step_8", "global_step_10", "global_step_11"}


def test_what_is_published_to_the_hub_may_go_while_all_of_it_is_there(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_hub(tmp_path / "hub") as hub:
        for name, value in hub.environment().items():
            monkeypatch.setenv(name, value)
        uri = "hf://tester/sft"
        for step in (8, 9):
            publish(base / "runs" / "sft" / f"global_step_{step}", uri, base / "scratch")
        age(base / "runs")
        asked = RetentionRequest(
            root=base / "runs", policy=RetentionPolicy(keep_newest=1), destinations=(Destination(uri=uri),)
        )
        assert [d.global_step for d in plan_root(asked) if d.action == "delete"] == [8, 9]
        # A person takes a weight file out of the branch of one step, and of the other deletes the branch.
        repo = hub.repos["tester/sft"]
        repo.commit("sft/step-8", "tidy up", "", {"model.safetensors": None})
        reasons = {d.global_step: "; ".join(d.reasons) for d in plan_root(asked)}
        assert "model.safetensors is gone from hf://tester/sft@sft/step-8" in reasons[8]
        del repo.branches["sft/step-9"]
        assert main(["retain", str(base / "runs"), "--keep", "1", "--to", uri]) == 0
        assert names_in(base / "runs" / "sft") == {f"global_step_{step}" for step in STEPS}


def test_any_destination_is_enough_where_that_is_asked_for(base: Path) -> None:
    places = (f"file://{base}/second", f"file://{base}/models")
    publish(base / "runs" / "sft" / "global_step_10", places[0], base / "scratch")
    shutil.rmtree(base / "models" / "sft" / "step-9")
    age(base / "runs")

    def asked(proven_at: Literal["all", "any"], *uris: str) -> dict[int | None, Decision]:
        destinations = tuple(Destination(uri=uri, settings=PublishSettings(max_attempts=1)) for uri in uris)
        policy = RetentionPolicy(keep_newest=1)
        root = base / "runs"
        wanted = RetentionRequest(root=root, policy=policy, destinations=destinations, proven_at=proven_at)
        return {decision.global_step: decision for decision in plan_root(wanted)}

    decided = asked("any", *places)
    assert [step for step, decision in decided.items() if decision.action == "delete"] == [8, 10]
    assert all(place in "; ".join(decided[9].reasons) for place in places)
    assert [step for step, decision in asked("all", *places).items() if decision.action == "delete"] == [10]
    # A store that is away decides nothing, unless it is the only one that could.
    away = "hf://tester/away"
    with pytest.raises(PublishError):
        asked("any", away, *places)
    shutil.rmtree(base / "runs" / "sft" / "global_step_9")
    assert [step for step, d in asked("any", away, *places).items() if d.action == "delete"] == [8, 10]
    with pytest.raises(PublishError):
        asked("all", away, *places)


def test_the_best_by_values_of_events_stays_in_its_own_run(base: Path) -> None:
    shutil.copytree(base / "runs" / "sft", base / "runs" / "dpo")
    age(base / "runs")
    (base / "runs" / "sft" / "metrics.jsonl").write_text('{"step": 8, "acc": 0.9}\n')
    run = base / "runs" / "sft"
    events = (
        (run / "global_step_9" / "actor", 0.8),
        (run / "global_step_10", 0.1),
        (run / "global_step_10" / "actor", 0.95),  # told again
        (run / "global_step_1", 1.0),  # gone long ago
        (base / "elsewhere" / "global_step_9", 1.0),
    )
    best = KeepBest(count=1, metric="acc", mode="max")
    asked = RetentionRequest(
        root=base / "runs",
        policy=RetentionPolicy(keep_newest=1, keep_best=best),
        destinations=(Destination(uri=f"file://{base}/models"),),
        metric_events=events,
    )
    reasons = {d.location.relative_to(base / "runs").as_posix(): "; ".join(d.reasons) for d in plan_root(asked)}
    assert "among the best 1 by acc (0.95)" in reasons["sft/global_step_10"]
    assert reasons["sft/global_step_8"] == "published, and older than the newest 1"
    assert "no step of this run has a value of acc" in reasons["dpo/global_step_9"]


def test_a_destination_that_cannot_be_asked_stops_all(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = ["--to", "s3://bucket/models", "--endpoint-url", "http://127.0.0.1:9"]
    assert main(["retain", str(base / "runs"), "--keep", "1", *to]) == 1
    assert len(names_in(base / "runs" / "sft")) == 4
    assert capsys.readouterr().err


# --- incomplete, in progress, named, in use


def test_a_half_saved_newest_step_does_not_push_out_the_last_whole_one(base: Path) -> None:
    run = base / "runs" / "sft"
    (run / "global_step_11" / "actor" / "model_world_size_2_rank_1.pt").unlink()
    age(base / "runs")
    assert doomed(base) == [8, 9]
    assert "incomplete" in why(base, 11)
    assert "the newest" in why(base, 10)


def test_a_latest_link_to_a_step_that_is_still_written_leaves_the_one_before_it(base: Path) -> None:
    run = base / "runs" / "sft"
    with open(run / "global_step_11" / "actor" / "model_world_size_2_rank_0.pt", "r+b") as file:
        file.truncate(1000)
    (run / "latest").symlink_to("global_step_11")
    assert doomed(base) == [8, 9]


def test_what_a_tracker_names_stays(base: Path) -> None:
    run = base / "runs" / "sft"
    (run / "latest_checkpointed_iteration.txt").write_text("9")
    assert doomed(base) == [8, 10]
    assert "latest_checkpointed_iteration.txt names it" in why(base, 9)
    (run / "latest").write_text("global_step_8")
    assert doomed(base) == [10]
    (run / "best").symlink_to("global_step_10/actor")
    assert doomed(base) == []


def test_a_step_that_changed_a_moment_ago_stays_even_if_only_beside_the_weights(base: Path) -> None:
    (base / "runs" / "sft" / "global_step_8" / "data.pt").write_bytes(b"dataloader")
    assert doomed(base) == [9, 10]
    assert "settle time" in why(base, 8)


def test_a_step_with_an_open_file_stays(base: Path) -> None:
    name = base / "runs" / "sft" / "global_step_9" / "actor" / "model_world_size_2_rank_0.pt"
    with open(name, "rb") as file:
        reader = subprocess.Popen(["sleep", "60"], stdin=file)
    try:
        assert doomed(base) == [8, 10]
        assert f"process {reader.pid} has" in why(base, 9)
    finally:
        reader.kill()
        reader.wait()
    assert doomed(base) == [8, 9, 10]


def test_a_step_on_which_a_flow_works_stays(base: Path) -> None:
    with exclusive(base / "runs" / "sft" / ".ckptflow" / ".sft-step-9.lock"):
        assert doomed(base) == [8, 10]
        assert "a run of ckptflow holds" in why(base, 9)
    assert doomed(base) == [8, 9, 10]


def test_a_flow_is_seen_at_work_on_a_run_whose_name_has_spaces(base: Path) -> None:
    run = base / "runs" / "my sft"
    (base / "runs" / "sft").rename(run)
    place = Workplace.of(Machine(), locate(run / "global_step_9"))
    with exclusive(place.lock):
        assert "a run of ckptflow holds" in str(planned(base)[9].facts.in_use)
    assert planned(base)[9].facts.in_use is None


def test_a_step_from_which_a_conversion_reads_stays_wherever_it_writes(base: Path, tmp_path: Path) -> None:
    plan_seen: list[list[int]] = []
    request = ConvertRequest(path=base / "runs" / "sft" / "global_step_9" / "actor", out=tmp_path / "elsewhere" / "out")

    def look(_: Conversion) -> None:
        plan_seen.append(doomed(base))
        assert "a run of ckptflow reads it" in why(base, 9)

    convert(request, look)
    assert plan_seen == [[8, 10]]
    assert doomed(base) == [8, 9, 10]


def test_no_step_goes_while_a_conversion_writes_into_the_run(base: Path) -> None:
    with exclusive(base / "runs" / "sft" / ".merged.ckptflow" / "lock"):
        assert doomed(base) == []


# --- what a step is


def test_a_run_of_files_loses_files(tmp_path: Path) -> None:
    import torch

    run = tmp_path / "lightning"
    run.mkdir()
    for step in (20, 100):
        content = {
            "state_dict": {"up.weight": torch.ones(4, 4), "down.bias": torch.ones(4)},
            "pytorch-lightning_version": "2.5.0",
        }
        torch.save(content, run / f"epoch=1-step={step}.ckpt")
    (run / "last.ckpt").symlink_to("epoch=1-step=100.ckpt")
    (run / "hparams.yaml").write_text("lr: 1")
    for step in (20, 100):
        publish(run / f"epoch=1-step={step}.ckpt", f"file://{tmp_path}/models", tmp_path / "scratch")
    age(run)
    asked = RetentionRequest(
        root=run, policy=RetentionPolicy(keep_newest=1), destinations=(Destination(uri=f"file://{tmp_path}/models"),)
    )
    decisions, _ = retain(asked)
    assert {d.global_step: d.action for d in decisions} == {20: "delete", 100: "keep"}
    assert names_in(run) == {"epoch=1-step=100.ckpt", "last.ckpt", "hparams.yaml"}


def test_a_checkpoint_without_a_step_in_its_name_is_never_deleted(tmp_path: Path) -> None:
    for name in ("final", "base-model"):
        hf_step(tmp_path / "run" / name)
        publish(tmp_path / "run" / name, f"file://{tmp_path}/models", tmp_path / "scratch")
    age(tmp_path / "run")
    asked = RetentionRequest(
        root=tmp_path / "run",
        policy=RetentionPolicy(keep_newest=1),
        destinations=(Destination(uri=f"file://{tmp_path}/models"),),
    )
    assert [d.action for d in plan_root(asked)] == ["keep", "keep"]


def test_steps_sort_as_numbers_on_the_disk_too(tmp_path: Path) -> None:
    for step in (9000, 10000):
        hf_step(tmp_path / "run" / f"checkpoint-{step}")
        publish(tmp_path / "run" / f"checkpoint-{step}", f"file://{tmp_path}/models", tmp_path / "scratch")
    age(tmp_path / "run")
    asked = RetentionRequest(
        root=tmp_path / "run",
        policy=RetentionPolicy(keep_newest=1),
        destinations=(Destination(uri=f"file://{tmp_path}/models"),),
    )
    retain(asked)
    assert names_in(tmp_path / "run") == {"checkpoint-10000"}


def test_the_best_is_read_from_the_trainers_state_and_its_own_best_stays_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    losses = {10: 0.9, 20: 0.1, 30: 0.5, 40: 0.6, 50: 0.7}
    for step in losses:
        directory = hf_step(run / f"checkpoint-{step}")
        history = [{"step": s, "eval_loss": loss} for s, loss in losses.items() if s <= step]
        state = {"log_history": history, "best_model_checkpoint": "/cluster/run/checkpoint-30"}
        (directory / "trainer_state.json").write_text(json.dumps(state))
        publish(directory, f"file://{tmp_path}/models", tmp_path / "scratch")
    age(run)
    to = ("--to", f"file://{tmp_path}/models", "--keep", "1")
    assert main(["retain", str(run), *to, "--best", "1", "--metric", "eval_loss", "--mode", "min"]) == 0
    assert names_in(run) == {"checkpoint-20", "checkpoint-30", "checkpoint-50"}


# --- files of metrics


def test_the_last_line_of_a_file_of_metrics_may_be_half_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2}\n\n{"step": 2, "loss": NaN}\n{"step": 1, "loss": 1.5}\n{"step": 3, "lo')
    assert file_metrics(path, "loss") == {1: 1.5}
    path.write_text('{"step": 1, "lo\n{"step": 3, "loss": 1}\n')
    with pytest.raises(CheckpointError, match="not valid JSON"):
        file_metrics(path, "loss")


@pytest.mark.parametrize(
    "document",
    [
        {"7": 0.5},
        {"7": {"loss": 0.5, "acc": 1}},
        [{"global_step": 7, "loss": 0.5}, {"global_step": 8}, "text"],
        {"log_history": [{"step": 7, "loss": 0.5}]},
        {"iteration": 7, "loss": 0.5},
        {"step": 7.0, "loss": 0.5},
    ],
)
def test_one_json_document_may_have_several_shapes(tmp_path: Path, document: object) -> None:
    (tmp_path / "m.json").write_text(json.dumps(document))
    assert file_metrics(tmp_path / "m.json", "loss") == {7: 0.5}


@pytest.mark.parametrize("content", ["", "[", "[" * 100_000])
def test_a_broken_or_empty_file_of_metrics_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "m.json").write_text(content)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        file_metrics(tmp_path / "m.json", "loss")


@pytest.mark.parametrize("content", ["null", "3", '"text"', "{}", "[1, null]", '[{"step": true, "loss": 1}]'])
def test_a_file_without_rows_gives_no_values(tmp_path: Path, content: str) -> None:
    (tmp_path / "m.json").write_text(content)
    assert file_metrics(tmp_path / "m.json", "loss") == {}


# --- deleting


CHILD = """
import os, signal, sys
event, count, renamed = sys.argv[1], int(sys.argv[2]), False
def hook(name, args):
    global count, renamed
    renamed = renamed or (name == "os.rename" and "ckptflow-deleting" in str(args))
    if renamed and name == event:
        count -= 1
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
from ckptflow.cli import main
main(sys.argv[3:])
"""


@pytest.mark.parametrize(
    ("event", "count", "half_deleted"),
    [("os.rename", 1, False), ("shutil.rmtree", 1, True), ("os.remove", 1, True), ("os.remove", 4, True)],
)
def test_a_kill_while_deleting_leaves_nothing_that_looks_like_a_checkpoint_and_the_next_run_ends_the_work(
    base: Path, event: str, count: int, half_deleted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = base / "runs" / "sft"
    killed = subprocess.run([sys.executable, "-c", CHILD, event, str(count), *command(base)], check=False)
    assert killed.returncode == -9
    leftover = f".global_step_8{SUFFIX}"
    assert (leftover in names_in(run)) == half_deleted
    left = [9, 10, 11] if half_deleted else [8, 9, 10, 11]
    assert [(f.location.global_step, f.state) for f in discover([run])] == [(step, "complete") for step in left]
    assert main(command(base, "--json")) == 0
    outcomes = [each["outcome"] for each in json.loads(capsys.readouterr().out)["removals"]]
    assert outcomes == (["leftover", "deleted", "deleted"] if half_deleted else ["deleted"] * 3)
    assert names_in(run) == {"global_step_11"}


def test_a_step_that_was_made_anew_beside_its_own_leftover_can_go(base: Path) -> None:
    run = base / "runs" / "sft"
    decisions = plan_root(request(base))
    shutil.copytree(run / "global_step_9", run / f".global_step_8{SUFFIX}")
    assert [removal.outcome for removal in carry_out(decisions)] == ["deleted"] * 3
    assert names_in(run) == {"global_step_11"}


def test_what_the_trainer_rotated_away_meanwhile_is_gone_and_no_error(base: Path) -> None:
    decisions = plan_root(request(base))
    shutil.rmtree(base / "runs" / "sft" / "global_step_9")
    assert [removal.outcome for removal in carry_out(decisions)] == ["deleted", "gone", "deleted"]


def test_two_runs_at_once_delete_each_step_once(base: Path) -> None:
    children = [
        subprocess.Popen([sys.executable, "-m", "ckptflow.cli", *command(base, "--json")], stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    documents = [json.loads(child.communicate()[0]) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    done = [r["path"] for d in documents for r in d["removals"] if r["outcome"] == "deleted"]
    assert sorted(done) == sorted(set(done))
    assert names_in(base / "runs" / "sft") == {"global_step_11"}


def test_a_step_that_changed_after_the_decision_stays(base: Path) -> None:
    decisions = plan_root(request(base))
    (base / "runs" / "sft" / "global_step_9" / "note.txt").write_text("the trainer is back")
    removals = {removal.location.name: removal for removal in carry_out(decisions)}
    assert removals["global_step_9"].outcome == "changed"
    assert (base / "runs" / "sft" / "global_step_9" / "actor").is_dir()


def test_a_step_that_is_opened_after_the_decision_stays(base: Path) -> None:
    decisions = plan_root(request(base))
    removals = list(carry_out(decisions, lambda path: "a reader" if path.name == "global_step_8" else None))
    assert (removals[0].outcome, removals[0].detail) == ("changed", "a reader")
    assert "global_step_8" in names_in(base / "runs" / "sft")


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may write everywhere: be somebody else, where the tests run as root."""
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)


@pytest.mark.parametrize("locked", ["global_step_9/actor", "."])
def test_a_read_only_directory_is_told_and_nothing_of_its_step_is_touched(base: Path, locked: str) -> None:
    # Somewhere that everybody may reach.
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(base / "runs", Path(place, "runs"))
        run = Path(place, "runs", "sft")
        os.chmod(place, 0o777)
        for path in (*Path(place).rglob("*"),):
            os.chmod(path, 0o777 if path.is_dir() else 0o666)
        decisions = plan_root(
            RetentionRequest(
                root=run,
                policy=RetentionPolicy(keep_newest=1),
                destinations=(Destination(uri=f"file://{base}/models"),),
                settle_seconds=0,
            )
        )
        os.chmod(run / locked, 0o555)
        before = sorted((run / "global_step_9").rglob("*"))
        with as_nobody():
            removals = {removal.location.name: removal for removal in carry_out(decisions)}
        os.chmod(run / locked, 0o777)
        assert removals["global_step_9"].outcome == "failed"
        assert "read-only" in removals["global_step_9"].detail
        assert sorted((run / "global_step_9").rglob("*")) == before
        assert removals["global_step_8"].outcome == ("failed" if locked == "." else "deleted")


def test_retention_survives_a_trainer_that_saves_and_rotates_at_the_same_time(base: Path) -> None:
    run = base / "runs" / "sft"
    trainer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import shutil, sys, time\n"
            "run = sys.argv[1]\n"
            "for step in range(20, 60):\n"
            "    shutil.copytree(f'{run}/global_step_11', f'{run}/tmp-global_step_{step}')\n"
            "    __import__('os').rename(f'{run}/tmp-global_step_{step}', f'{run}/global_step_{step}')\n"
            "    shutil.rmtree(f'{run}/global_step_{step - 2}', ignore_errors=True)\n",
            str(run),
        ]
    )
    while trainer.poll() is None:
        _, removals = retain(request(base))
        assert not [removal for removal in removals if removal.outcome == "failed"]
        time.sleep(0.01)
    assert trainer.returncode == 0
    assert names_in(run) == {"global_step_11", "global_step_58", "global_step_59"}
