"""What retention takes for a step of a run, and where it reads the values that make a step the best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptflow.cli import main
from ckptflow.errors import CheckpointError
from ckptflow.publish import Destination
from ckptflow.retention import RetentionPolicy, RetentionRequest, plan_root, retain
from ckptflow.retention.metrics import file_metrics
from retained import age, names_in, publish
from trainer_steps import hf_step


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


@pytest.mark.parametrize(
    "text",
    [
        f'{{"10": {"9" * 400}}}',
        f'{{"{"9" * 5000}": 1}}',
        f'[{{"step": {"9" * 400}, "loss": 1}}]',
        '{"10": NaN}',
        '[{"step": 1e400, "loss": 1}]',
    ],
)
def test_a_number_beyond_all_numbers_is_no_value(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.json").write_text(text)
    assert file_metrics(tmp_path / "metrics.json", "loss") == {}


def test_steps_and_values_may_be_as_large_as_names_and_floats(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text(f'{{"{2**70}": {10**300}}}')
    assert file_metrics(tmp_path / "metrics.json", "loss") == {2**70: 1e300}
