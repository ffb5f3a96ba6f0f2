"""Reported faults of whole checkpoints: ranks and steps that are missing, foreign, mixed up or misread."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fuzz_seeds
from ckptflow.convert import convert
from ckptflow.discovery.discover import by_step, discover
from ckptflow.errors import AmbiguousCheckpointError, CheckpointError, NotACheckpointError, UsageError
from ckptflow.formats.registry import locate
from ckptflow.inspection import inspect_checkpoint
from ckptflow.request import ConvertRequest
from deepspeed_parallel_writer import INFO, MODEL, cut
from deepspeed_writer import optim_states, parameters, write_zero2, write_zero3
from faults import age, converted, refused, same, save_dcp
from rank_writer import rank_name


def test_b12_b14_one_rank_with_plain_tensors_and_no_config_file(tmp_path: Path) -> None:
    state = {"a.weight": torch.randn(3, 2), "b.count": torch.tensor(7)}
    torch.save(state, tmp_path / rank_name(1, 0))
    found, record = converted(tmp_path, tmp_path / "out")
    assert same(found, state)
    assert record["source"]["world_size"] == 1


def test_b18_a_directory_beside_rank_files_with_config_and_tokenizer_only_is_no_model(tmp_path: Path) -> None:
    fuzz_seeds.fsdp(tmp_path)
    model = tmp_path / "global_step_10" / "actor" / "huggingface"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    assert locate(tmp_path).layout == "fsdp"
    with pytest.raises(NotACheckpointError):
        locate(model)


def test_b21_each_layout_gets_its_name_and_a_mixed_directory_is_ambiguous(tmp_path: Path) -> None:
    ranks, dcp_step, mixed = tmp_path / "ranks", tmp_path / "dcp", tmp_path / "mixed"
    for path in (ranks, dcp_step, mixed):
        path.mkdir()
    fuzz_seeds.fsdp_plain(ranks)
    fuzz_seeds.torch_dcp(dcp_step)
    for path in (ranks, dcp_step / "step-10"):
        shutil.copytree(path, mixed, dirs_exist_ok=True)
    assert locate(ranks).layout == "fsdp"
    assert locate(dcp_step).layout == "dcp"
    with pytest.raises(AmbiguousCheckpointError, match="two kinds"):
        locate(mixed)


def test_b64_a_step_that_lacks_a_rank_is_not_the_newest_complete_one(tmp_path: Path) -> None:
    fuzz_seeds.fsdp(tmp_path)
    shutil.copytree(tmp_path / "global_step_10", tmp_path / "global_step_20")
    (tmp_path / "global_step_20" / "actor" / rank_name(2, 1)).unlink()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    age(tmp_path)
    found = by_step(discover([tmp_path]))
    assert [(f.location.global_step, f.state) for f in found] == [(10, "complete"), (20, "incomplete")]


def test_b62_steps_sort_as_numbers(tmp_path: Path) -> None:
    for name in ("step_10000", "step_9000", "iter_0001000", "iter_0000900"):
        (tmp_path / name).mkdir()
        save_file({"a.weight": torch.ones(1)}, tmp_path / name / "model.safetensors")
    found = [f.location.path.name for f in by_step(discover([tmp_path], settle_seconds=0))]
    assert found == ["iter_0000900", "iter_0001000", "step_9000", "step_10000"]


def test_b26_data_files_that_are_empty_are_said_to_be(tmp_path: Path) -> None:
    path = save_dcp({"a.weight": torch.randn(2), "b.weight": torch.randn(2)}, tmp_path / "step-1")
    (path / "__1_0.distcp").touch()
    os.utime(path / "__1_0.distcp", ns=(0, 0))
    entries = inspect_checkpoint(path).manifest.left_out
    assert [(entry.name, "its rank wrote nothing" in entry.reason) for entry in entries] == [("__1_0.distcp", True)]


def test_b30_a_link_to_the_latest_step_proves_nothing(tmp_path: Path) -> None:
    for step in (10, 20):
        save_dcp({"a.weight": torch.randn(64), "b.weight": torch.randn(2)}, tmp_path / f"step_{step}")
    (tmp_path / "step_20" / ".metadata").unlink()
    os.truncate(tmp_path / "step_20" / "__0_0.distcp", 100)
    (tmp_path / "latest").symlink_to("step_20")
    age(tmp_path)
    found = {f.location.path.name: f.state for f in discover([tmp_path])}
    assert found == {"step_10": "complete", "step_20": "in-progress"}
    with pytest.raises(CheckpointError):
        convert(ConvertRequest(path=tmp_path / "latest", out=tmp_path / "out"))


def test_b32_files_of_wider_and_narrower_runs_are_foreign_and_named(tmp_path: Path) -> None:
    values = parameters({"a.weight": (4, 4), "b.weight": (4,)})
    folder = write_zero2(tmp_path, [values], 2)
    for rank in (2, 3):
        optim_states(folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", rank, [values], world=4)
    error = refused(tmp_path, tmp_path / "out")
    assert "rank_2" in str(error.found)
    assert "rank_3" in str(error.found)


def test_b32_ranks_that_each_think_they_were_alone_are_refused(tmp_path: Path) -> None:
    values = parameters({"a.weight": (4, 4), "b.weight": (4,)})
    folder = write_zero2(tmp_path, [values], 1)
    for rank in (1, 2, 3):
        optim_states(folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", 0, [values], world=1)
    assert "partition_count" in str(refused(tmp_path, tmp_path / "out"))


def test_b38_tensor_parallel_ranks_of_zero_3_are_joined(tmp_path: Path) -> None:
    values = parameters(MODEL)
    for mp in range(2):
        mine = {name: cut(name, tensor, mp) for name, tensor in values.items()}
        model = {"mp_world_size": 2, "universal_checkpoint_info": INFO}
        write_zero3(tmp_path / "c", [mine], 2, mp=mp, **model)
    found, record = converted(tmp_path / "c", tmp_path / "out")
    assert same(found, values)
    assert record["source"]["mesh"] == "2×2 (dp, tp)"


def test_b42_lightning_s_folder_of_many_ranks_with_a_prefix_and_no_latest(tmp_path: Path) -> None:
    values = parameters({"model.a.weight": (40, 7), "model.b.weight": (13,), "head.weight": (5, 5)})
    folder = tmp_path / "epoch=1-step=20187.ckpt"
    write_zero2(folder, [values], 12, tag="checkpoint", latest=False)
    found, record = converted(folder, tmp_path / "out")
    assert same(found, values)
    assert record["source"]["world_size"] == 12
    assert [f.state for f in discover([folder], settle_seconds=0)] == ["complete"]


def test_slices_whose_last_rank_may_be_missing_need_a_config(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    fuzz_seeds.dcp_hf(tmp_path / "c")
    assert inspect_checkpoint(tmp_path / "c").manifest.doubt is not None
    with pytest.raises(UsageError, match="--config"):
        convert(ConvertRequest(path=tmp_path / "c", out=tmp_path / "out"))
    convert(ConvertRequest(path=tmp_path / "c", out=tmp_path / "out", config_dir=tmp_path / "config"))


def test_b50_both_of_megatron_s_formats_are_told_apart(tmp_path: Path) -> None:
    for name, seed in (
        ("dist", fuzz_seeds.megatron_dist_checkpoint),
        ("legacy", fuzz_seeds.megatron_legacy_checkpoint),
    ):
        (tmp_path / name).mkdir()
        seed(tmp_path / name)
    (tmp_path / "dist" / "latest_checkpointed_iteration.txt").write_text("10")
    assert locate(tmp_path / "dist").layout == "megatron-dist"
    assert locate(tmp_path / "legacy").layout == "megatron-legacy"


def test_b50_a_damaged_metadata_json_does_not_make_it_plain_dcp(tmp_path: Path) -> None:
    fuzz_seeds.megatron_dist_checkpoint(tmp_path)
    (tmp_path / "iter_0000010" / "metadata.json").write_text('{"model_type": "llama"}')
    refused(tmp_path / "iter_0000010", tmp_path / "out")
    (tmp_path / "iter_0000010" / "common.pt").unlink()
    refused(tmp_path / "iter_0000010", tmp_path / "out")


def test_a_rank_s_file_copied_over_another_one_is_refused(tmp_path: Path) -> None:
    fuzz_seeds.megatron_legacy_checkpoint(tmp_path)
    ranks = tmp_path / "iter_0000010"
    shutil.copy(ranks / "mp_rank_00_000" / "model_optim_rng.pt", ranks / "mp_rank_01_000" / "model_optim_rng.pt")
    assert "copied" in refused(ranks, tmp_path / "out", config_dir=tmp_path / "config").what


@pytest.mark.parametrize("layout", ["zero_2", "zero_3", "pipeline"])
def test_ranks_files_that_were_swapped_are_refused(tmp_path: Path, layout: str) -> None:
    fuzz_seeds.SEEDS[layout](tmp_path)
    first, second = sorted(tmp_path.rglob("*optim_states.pt"))[:2]
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    assert "another rank's name" in refused(tmp_path, tmp_path / "out").what
