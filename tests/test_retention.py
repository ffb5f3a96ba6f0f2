"""Which steps of a run go and which stay: real checkpoints, with models published for real."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Literal

import pytest

from checkpoints import write_fsdp_step
from ckptflow.cli import main
from ckptflow.discovery.discover import discover
from ckptflow.errors import PublishError, UsageError
from ckptflow.publish import Destination, PublishSettings
from ckptflow.retention import Decision, KeepBest, RetentionPolicy, RetentionRequest, plan_root
from retained import age, names_in, publish
from retention_run import STEPS, command, doomed, request, why
from servers.hub import running_hub
from servers.seaweed import S3Server


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


@pytest.mark.parametrize(
    "marker",
    [
        '{"source": [1]}',
        '{"source": {"files": [1]}}',
        '{"source": {"files": {"a": 1}}}',
        '{"source": {"files": {"\\u0000": {"bytes": 1}}}}',
        "[" * 100_000,
        "null",
    ],
)
def test_a_file_of_the_markers_name_that_is_none_proves_nothing(base: Path, marker: str) -> None:
    for path in (base / "models").rglob("ckptflow.json"):
        path.write_text(marker)
    assert {d.action for d in plan_root(request(base))} == {"keep"}


def test_a_pin_that_holds_nothing_is_told(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan_root(request(base, pinned=("checkpoint-9999", "sft/*")))
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["checkpoint-9999"]
