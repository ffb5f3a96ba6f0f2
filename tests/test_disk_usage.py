"""disk-usage counts as `du` does, and says what run, step and kind of file the space goes to."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from checkpoints import write_fsdp_step
from ckptflow.cli import main
from ckptflow.diskusage.report import disk_usage, savings_of_retention, savings_of_shrinking
from ckptflow.errors import NotACheckpointError
from ckptflow.files.kinds import kind_of_directory, kind_of_file
from ckptflow.files.treesize import tree_size
from ckptflow.publish import Destination
from ckptflow.retention import RetentionPolicy, RetentionRequest
from retained import age, as_nobody, publish


def du(path: Path, *options: str) -> int:
    """What GNU du says, in bytes."""
    return int(
        subprocess.run(["du", "-s", "-B1", *options, str(path)], check=True, capture_output=True).stdout.split()[0]
    )


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two FSDP steps with optimizers in one run, a Trainer's step in another, and a dataset beside."""
    root = tmp_path / "runs"
    for step in (9, 10):
        actor = write_fsdp_step(root / "sft", step) / "actor"
        for rank in (0, 1):
            (actor / f"optim_world_size_2_rank_{rank}.pt").write_bytes(bytes(100_000))
    trainer = root / "group" / "dpo" / "checkpoint-500"
    trainer.mkdir(parents=True)
    save_file({"w": np.ones((64, 64), np.float32)}, trainer / "model.safetensors")
    torch.save({"state": torch.ones(128, 64)}, trainer / "optimizer.pt")
    (root / "sft" / "train.log").write_text("loss 1\n" * 1000)
    (root / "data" / "deep").mkdir(parents=True)
    (root / "data" / "deep" / "rows.bin").write_bytes(bytes(30_000))
    return root


def test_the_sum_is_what_du_says(runs: Path) -> None:
    usage = disk_usage(runs)
    assert usage.allocated_bytes == du(runs)
    assert usage.to_json()["files"] == 1 + sum(1 for _ in runs.rglob("*"))
    apparent = sum(path.stat().st_size for path in runs.rglob("*") if path.is_file())
    assert usage.to_json()["apparent_bytes"] == apparent


def test_space_goes_to_the_run_step_and_kind_that_take_it(runs: Path) -> None:
    rows = {(row.run, row.global_step, row.kind): row for row in disk_usage(runs).rows}
    actor = runs / "sft" / "global_step_10" / "actor"
    weights = rows["sft", 10, "weights"]
    assert weights.apparent_bytes == sum(path.stat().st_size for path in actor.glob("model_world*"))
    assert weights.file_count == 2
    assert rows["sft", 9, "optimizer"].apparent_bytes == 200_000
    assert rows["sft", None, "other"].apparent_bytes >= 7000
    dpo = runs / "group" / "dpo" / "checkpoint-500"
    assert rows["group/dpo", 500, "weights"].apparent_bytes == (dpo / "model.safetensors").stat().st_size
    assert rows["group/dpo", 500, "optimizer"].apparent_bytes == (dpo / "optimizer.pt").stat().st_size
    assert rows["data", None, "other"].apparent_bytes == 30_000
    assert list(rows) == sorted(rows, key=list(rows).index)


def test_a_root_that_is_a_run_or_a_step_is_named(runs: Path) -> None:
    run = disk_usage(runs / "sft")
    assert {(row.run, row.global_step) for row in run.rows} == {(".", None), (".", 9), (".", 10)}
    assert run.name_of(".") == "sft"
    step = disk_usage(runs / "sft" / "global_step_9")
    assert {(row.run, row.global_step) for row in step.rows} == {("sft", 9)}
    assert step.allocated_bytes == du(runs / "sft" / "global_step_9")


def test_a_hard_link_counts_once_and_a_sparse_file_what_it_takes(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for step in (1, 2):
        (root / f"step-{step}").mkdir(parents=True)
    (root / "step-1" / "model.safetensors").write_bytes(bytes(50_000))
    os.link(root / "step-1" / "model.safetensors", root / "step-2" / "model.safetensors")
    with open(root / "step-2" / "optimizer.pt", "wb") as file:
        file.truncate(1 << 30)
    usage = disk_usage(root)
    assert usage.allocated_bytes == du(root) < 200_000
    assert sum(row.apparent_bytes for row in usage.rows if row.kind == "weights") == 50_000
    assert sum(row.apparent_bytes for row in usage.rows if row.kind == "optimizer") == 1 << 30


def test_deleting_one_of_two_hard_links_frees_nothing_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(bytes(80_000))
    os.link(tmp_path / "a" / "file", tmp_path / "a" / "again")
    inside = tree_size(tmp_path / "a")
    os.link(tmp_path / "a" / "file", tmp_path / "outside")
    outside = tree_size(tmp_path / "a")
    assert inside is not None
    assert outside is not None
    assert inside.freed_bytes == inside.allocated_bytes == outside.allocated_bytes == du(tmp_path / "a")
    assert outside.freed_bytes <= outside.allocated_bytes - 80_000
    assert tree_size(tmp_path / "nothing") is None


def test_links_are_not_followed_and_a_loop_ends(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "up").symlink_to("..")
    assert disk_usage(tmp_path).allocated_bytes == du(tmp_path)


def test_single_files_may_be_steps_and_a_step_inside_a_step_is_one(tmp_path: Path) -> None:
    version = tmp_path / "version_0" / "checkpoints"
    version.mkdir(parents=True)
    for step in (20, 100):
        (version / f"epoch=1-step={step}.ckpt").write_bytes(bytes(10_000 * step))
    deepspeed = tmp_path / "ds" / "checkpoint-5" / "global_step5"
    deepspeed.mkdir(parents=True)
    (deepspeed / "mp_rank_00_model_states.pt").write_bytes(bytes(70_000))
    sizes = {(r.run, r.global_step, r.kind): r.apparent_bytes for r in disk_usage(tmp_path).rows if r.apparent_bytes}
    assert sizes == {
        ("ds", 5, "weights"): 70_000,
        ("version_0/checkpoints", 20, "weights and optimizer"): 200_000,
        ("version_0/checkpoints", 100, "weights and optimizer"): 1_000_000,
    }


def test_a_run_whose_name_looks_like_a_step_is_a_run(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / "ckpt-7b" / f"global_step_{step}").mkdir(parents=True)
        (tmp_path / "ckpt-7b" / f"global_step_{step}" / "model.safetensors").write_bytes(b"x")
    (tmp_path / "ckpt-7b" / "log").write_bytes(b"xy")
    sizes = {(r.run, r.global_step): r.apparent_bytes for r in disk_usage(tmp_path).rows if r.apparent_bytes}
    assert sizes == {("ckpt-7b", None): 2, ("ckpt-7b", 1): 1, ("ckpt-7b", 2): 1}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model-00001-of-00002.safetensors", "weights"),
        ("model_world_size_8_rank_3.pt", "weights"),
        ("optim_world_size_8_rank_3.pt", "optimizer"),
        ("extra_state_world_size_8_rank_3.pt", "other"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", "weights"),
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "optimizer"),
        ("pytorch_model-00001-of-00002.bin", "weights"),
        ("training_args.bin", "other"),
        ("optimizer.bin", "optimizer"),
        ("scheduler.pt", "other"),
        ("model_optim_rng.pt", "weights and optimizer"),
        ("distrib_optim.pt", "optimizer"),
        ("__0_0.distcp", "weights and optimizer"),
        ("last.ckpt", "weights and optimizer"),
        ("net-0010.params", "weights"),
        ("net-0010.states", "optimizer"),
        ("tokenizer.json", "other"),
    ],
)
def test_the_kind_of_a_file_is_told_from_its_name(name: str, kind: str) -> None:
    assert kind_of_file(name) == kind


def test_the_directory_of_dcp_files_tells_their_kind() -> None:
    assert kind_of_file("__0_0.distcp", kind_of_directory("optimizer_0")) == "optimizer"
    assert kind_of_file("__0_0.distcp", kind_of_directory("pytorch_model_fsdp_0")) == "weights"


def test_a_directory_that_cannot_be_read_is_told(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for parent in (runs, *list(runs.parents)[:-2]):
        os.chmod(parent, 0o755)
    os.chmod(runs / "data" / "deep", 0o700)
    with as_nobody():
        usage = disk_usage(runs)
        assert main(["disk-usage", str(runs)]) == 0
    os.chmod(runs / "data" / "deep", 0o755)
    assert usage.unreadable == (str(runs / "data" / "deep"),)
    assert "can't be read" in capsys.readouterr().err


def test_a_root_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError, match="no such directory"):
        disk_usage(tmp_path / "nothing")


def test_what_shrinking_would_free_is_what_it_frees(tmp_path: Path) -> None:
    step = tmp_path / "run" / "step-1"
    step.mkdir(parents=True)
    torch.save({"a": torch.zeros(100_000)[:10], "b": torch.ones(10)}, step / "extra.pt")
    before = du(step, "--apparent-size")
    saving = savings_of_shrinking(tmp_path)
    assert saving.freed_bytes > 390_000
    assert saving.count == 1
    assert main(["shrink", str(step)]) == 0
    assert before - du(step, "--apparent-size") == saving.freed_bytes


def test_what_retention_would_free_is_told_for_now_and_for_ever(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    age(runs)
    request = RetentionRequest(
        root=runs, policy=RetentionPolicy(keep_newest=1), destinations=(Destination(uri=f"file://{tmp_path}/models"),)
    )
    ever, now = savings_of_retention(request)
    assert (ever.count, now.count) == (1, 0)
    assert (ever.freed_bytes, now.freed_bytes) == (du(runs / "sft" / "global_step_9"), 0)
    publish(runs / "sft" / "global_step_9", f"file://{tmp_path}/models", tmp_path / "scratch")
    age(runs)
    arguments = ["disk-usage", str(runs), "--keep", "1", "--to", f"file://{tmp_path}/models", "--json"]
    assert main(arguments) == 0
    savings = json.loads(capsys.readouterr().out)["savings"]
    assert [each["freed_bytes"] for each in savings] == [ever.freed_bytes] * 2


def test_the_table_names_runs_steps_and_kinds(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["disk-usage", str(runs), "--shrink"]) == 0
    printed = capsys.readouterr().out
    for text in ("group/dpo", "sft", "500", "optimizer", "weights", "100.0 %", "shrink: "):
        assert text in printed


def test_a_hundred_thousand_files_take_less_than_three_seconds(tmp_path: Path) -> None:
    first = tmp_path / "seed"
    first.write_bytes(b"x")
    # Real files cost the file system seconds to make; links look the same to the walk, and cost it a set besides.
    for step in range(100):
        directory = tmp_path / "run" / f"global_step_{step}" / "actor"
        directory.mkdir(parents=True)
        for rank in range(1000):
            try:
                os.link(first, directory / f"model_world_size_1000_rank_{rank}.pt")
            except OSError:  # ext4 has at most 65,000 links
                first = directory / f"model_world_size_1000_rank_{rank}.pt"
                first.write_bytes(b"x")
    began = time.process_time()
    usage = disk_usage(tmp_path / "run")
    assert time.process_time() - began < 3
    assert len({row.global_step for row in usage.rows}) == 101
