"""Faults that people reported of other tools, each as the small input that shows it, from the files to the output.

Rows whose input is the subject of a test elsewhere:

| fault | test |
|---|---|
| B10 equal head and embedding that are apart | test_convert: equal_tied_weights_are_written_once |
| B13 buffers that all ranks repeat | test_format_fsdp: plain_tensors_that_all_ranks_repeat_are_taken_once |
| B15 adapter in rank files | test_lora_plan: adapters_fold_to_what_peft_merges |
| B17 names of a wrapped model | test_format_huggingface: names_of_a_wrapped_model_are_never_taken_as_they_are |
| B20 tracker missing or behind | test_format_fsdp: a_run_without_a_tracker_…, a_tracker_that_lags_behind_… |
| B27 shards without an index | test_format_huggingface: shards_come_back_with_and_without_their_index |
| B29 source rewritten meanwhile | test_convert: a_source_that_changes_meanwhile_is_refused |
| B31 cut files | test_torchfiles: a_file_cut_off_anywhere_…; test_format_safetensors: a_file_cut_anywhere_… |
| B33 padding of several groups | test_format_deepspeed: zero_2_groups_are_joined_over_ranks |
| B35 frozen weights saved empty | test_format_deepspeed: frozen_weights_that_were_saved_empty_are_named |
| B37 experts | test_format_deepspeed_parallel: experts_are_joined_under_their_global_numbers |
| B44 odd partition boundaries | test_format_deepspeed: zero_2_…, zero_3_parameters_are_joined_… |
| B45 names that match nothing | test_format_megatron_legacy: a_tensor_that_no_table_knows_…, an_expert_… |
| B46 B48 gate and up, vocabulary padding | test_format_megatron_legacy: every_family_comes_back_bit_for_bit |
| B54 dtypes that must stay | test_transforms: tensors_that_need_fp32_keep_it_…; test_engine_refusals |
| B58 an index of another save | test_format_huggingface: a_missing_shard_is_incomplete_… |
| B66 names that are renamed meanwhile | test_discover: staging_names_are_ignored, steps_that_are_renamed_… |
| B81 an index that leads outside | test_format_huggingface: an_index_that_leads_out_…, a_shard_that_is_a_link_out_… |
| L3 .metadata of another save | test_format_dcp: metadata_of_another_step_…, data_files_of_another_step_… |
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

import fuzz_seeds
from ckptflow.convert import claim, convert, finish
from ckptflow.convert import plan_conversion as plan
from ckptflow.discover import by_step, discover
from ckptflow.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    InconsistentCheckpointError,
    NotACheckpointError,
    OutputError,
    UnsafeFileError,
    UsageError,
)
from ckptflow.formats.registry import check, locate
from ckptflow.inspection import inspect_checkpoint
from ckptflow.request import ConvertRequest
from ckptflow.validate.verify import VerifyOptions, verify
from deepspeed_writer import optim_states, parameters, write_zero2, write_zero3
from rank_writer import rank_name
from test_format_deepspeed_parallel import INFO, MODEL, cut

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = {"model_type": "llama", "tie_word_embeddings": True}


def converted(path: Path, out: Path, **options: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors that were written, and the record."""
    record = convert(ConvertRequest(path=path, out=out, **{"dtype": "source", **options}))
    return {n: t for file in sorted(out.glob("*.safetensors")) for n, t in load_file(file).items()}, record


def refused(path: Path, out: Path, **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as error:
        convert(ConvertRequest(path=path, out=out, **options))
    assert not out.exists()
    return error.value


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


def states(root: Path) -> dict[str, str]:
    return {f.location.path.name: f.state for f in discover([root], settle_seconds=0)}


def save_dcp(state: dict[str, Any], path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in one process
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def age(path: Path, seconds: float = 10_000) -> None:
    """As if all of it had been written long ago."""
    for file in [path, *path.rglob("*")]:
        moment = file.stat(follow_symlinks=False).st_mtime - seconds
        os.utime(file, (moment, moment), follow_symlinks=False)


# Ties


@pytest.mark.parametrize("tied", [True, False])
def test_b05_a_shared_parameter_has_both_names_or_its_tie(tmp_path: Path, tied: bool) -> None:
    values = parameters({EMBEDDING: (6, 4), "model.norm.weight": (4,)})
    module = {n: t.bfloat16() for n, t in values.items()}
    module[HEAD] = module[EMBEDDING]
    write_zero2(tmp_path / "c", [values], 2, module=module, model={"shared_params": {HEAD: EMBEDDING}})
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text(json.dumps({**TIED, "tie_word_embeddings": tied}))
    found, record = converted(tmp_path / "c", tmp_path / "out", config_dir=config)
    assert same(found, values if tied else {**values, HEAD: values[EMBEDDING]})
    assert record["ties"] == ({HEAD: EMBEDDING} if tied else {})


@pytest.mark.parametrize("write", [torch.save, save_dcp], ids=["torch", "dcp"])
def test_b07_l8_a_tied_head_is_written_once_and_recorded(tmp_path: Path, write: Callable[..., object]) -> None:
    embedding = torch.randn(6, 4)
    state = {EMBEDDING: embedding, HEAD: embedding, "model.norm.weight": torch.randn(4)}
    write(state, tmp_path / ("pytorch_model.bin" if write is torch.save else "step-1"))
    path = tmp_path if write is torch.save else tmp_path / "step-1"
    (path / "config.json").write_text(json.dumps(TIED))
    found, record = converted(path, tmp_path / "out")
    assert found.keys() == {EMBEDDING, "model.norm.weight"}
    assert record["ties"] == {HEAD: EMBEDDING}


def test_b08_views_that_overlap_are_written_apart_and_it_is_said(tmp_path: Path) -> None:
    whole = torch.randn(300)
    state = {"a.weight": whole[:200], "c.weight": whole[100:]}
    torch.save(state, tmp_path / "pytorch_model.bin")
    found, record = converted(tmp_path, tmp_path / "out")
    assert same(found, state)
    assert any("a.weight and c.weight" in note for note in record["notes"])


def test_b08_views_side_by_side_need_no_word(tmp_path: Path) -> None:
    whole = torch.randn(300)
    torch.save({"a.weight": whole[:200], "c.weight": whole[200:]}, tmp_path / "pytorch_model.bin")
    assert not any("a.weight" in note for note in converted(tmp_path, tmp_path / "out")[1]["notes"])


@pytest.mark.parametrize("layout", ["rank files", "dcp", "safetensors"])
def test_b09_a_head_that_differs_is_never_dropped_for_the_config_s_sake(tmp_path: Path, layout: str) -> None:
    embedding = torch.randn(6, 4)
    head = embedding.clone()
    head[0] += 1
    state = {EMBEDDING: embedding, HEAD: head}
    path = tmp_path / "step-1"
    path.mkdir()
    if layout == "dcp":
        save_dcp(state, path)
    elif layout == "safetensors":
        save_file(state, path / "model.safetensors")
    else:
        torch.save(state, path / rank_name(1, 0))
    (path / "config.json").write_text(json.dumps(TIED))
    error = refused(path, tmp_path / "out")
    assert isinstance(error, InconsistentCheckpointError)
    assert error.tensor == HEAD
    (path / "config.json").write_text(json.dumps({**TIED, "tie_word_embeddings": False}))
    assert same(converted(path, tmp_path / "out")[0], state)


# Rank files


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


# Steps that do nothing, and OUT


def test_b24_a_weight_file_that_nobody_wrote_is_not_published(tmp_path: Path) -> None:
    fuzz_seeds.hf_safetensors(tmp_path)
    conversion = plan(ConvertRequest(path=tmp_path, out=tmp_path / "out"))
    with pytest.raises(OutputError, match="has not been written"), claim(conversion):
        finish(conversion)
    with claim(conversion):
        (conversion.workspace.model / "model.safetensors").write_bytes(b"")
        with pytest.raises(OutputError, match="has not been written"):
            finish(conversion)
        conversion.workspace.discard()
    assert not (tmp_path / "out").exists()


def test_b57_nothing_of_a_sharded_model_stays_behind_a_single_file(tmp_path: Path) -> None:
    fuzz_seeds.hf_safetensors(tmp_path)
    out = tmp_path / "out"
    converted(tmp_path, out, max_shard_bytes=1)
    assert len(list(out.glob("*.safetensors"))) == len(fuzz_seeds.SHAPES)
    converted(tmp_path, out, overwrite=True)
    assert sorted(p.name for p in out.iterdir()) == ["ckptflow.json", "config.json", "model.safetensors"]


# DCP


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


# DeepSpeed


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


# Adapters, placeholders


@pytest.mark.parametrize("case", ["every tensor", "only the embedding", "no tensor at all"])
def test_b43_an_adapter_that_was_not_gathered_is_incomplete_and_refused(tmp_path: Path, case: str) -> None:
    prefix, empty = "base_model.model.", torch.zeros(0)
    tensors = {f"{prefix}q.lora_A.weight": torch.randn(2, 4), f"{prefix}q.lora_B.weight": torch.randn(4, 2)}
    if case == "every tensor":
        tensors = dict.fromkeys(tensors, empty)
    tensors = {} if case == "no tensor at all" else {**tensors, f"{prefix}embed.weight": empty}
    save_file(tensors, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"], "modules_to_save": ["embed"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    age(tmp_path)
    assert check(locate(tmp_path)).state == "incomplete"
    refused(tmp_path, tmp_path / "out", adapter="export")


def test_b43_a_model_whose_weights_were_not_gathered_is_incomplete_too(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(0), "b.weight": torch.randn(3)}, tmp_path / "model.safetensors")
    age(tmp_path)
    assert check(locate(tmp_path)).state == "incomplete"
    assert refused(tmp_path, tmp_path / "out").tensor == "a.weight"


# Megatron


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


# Dtypes and side files


def test_b52_config_and_index_follow_the_cast(tmp_path: Path) -> None:
    fuzz_seeds.hf_safetensors(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "other", "torch_dtype": "bfloat16"}))
    found, _ = converted(tmp_path, tmp_path / "out", dtype="bfloat16", max_shard_bytes=32)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    converted(tmp_path, tmp_path / "out32", dtype="float32")
    config = json.loads((tmp_path / "out32" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "float32"


def test_b55_tokenizer_files_are_the_source_s_own_byte_for_byte(tmp_path: Path) -> None:
    fuzz_seeds.hf_safetensors(tmp_path)
    side = {
        "special_tokens_map.json": '{"eos_token": {"content": "<|im_end|>", "lstrip": false}}',
        "tokenizer_config.json": '{"eos_token": "<|im_end|>", "chat_template": "x"}',
        "tokenizer.json": '{"version":  "1.0"}',
        "chat_template.jinja": "{{ messages }}\n",
        "generation_config.json": '{"eos_token_id": [1, 2]}',
    }
    for name, text in side.items():
        (tmp_path / name).write_text(text)
    config = {"model_type": "other", "dtype": "bfloat16", "eos_token_id": 2, "unknown_field": [1.5, None]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    converted(tmp_path, tmp_path / "out", dtype="bfloat16")
    assert {name: (tmp_path / "out" / name).read_text() for name in side} == side
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


def test_b60_an_invalid_generation_config_stops_nothing_and_is_said(tmp_path: Path) -> None:
    fuzz_seeds.hf_safetensors(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.5}')
    _, record = converted(tmp_path, tmp_path / "out")
    assert any("temperature" in note for note in record["notes"])


def test_b62_steps_sort_as_numbers(tmp_path: Path) -> None:
    for name in ("step_10000", "step_9000", "iter_0001000", "iter_0000900"):
        (tmp_path / name).mkdir()
        save_file({"a.weight": torch.ones(1)}, tmp_path / name / "model.safetensors")
    found = [f.location.path.name for f in by_step(discover([tmp_path], settle_seconds=0))]
    assert found == ["iter_0000900", "iter_0001000", "step_9000", "step_10000"]


# Hostile files


class Command:
    """Runs when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.file), "w")


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "m.ckpt",
        "m.pt",
        "pytorch_model_fsdp.bin",
        rank_name(1, 0),
        "t/mp_rank_00_model_states.pt",
        "mp_rank_00/model_optim_rng.pt",
        ".metadata",
    ],
)
def test_b82_l5_code_in_any_file_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    path, made = tmp_path / "c" / name, tmp_path / "made"
    path.parent.mkdir(parents=True)
    value = {"state_dict": {"w": torch.ones(2)}, "module": {"w": torch.ones(2)}, "x": Command(made)}
    if name == ".metadata":
        import pickle

        path.write_bytes(pickle.dumps(value["x"]))
        (tmp_path / "c" / "__0_0.distcp").write_bytes(b"x")
    else:
        torch.save(value, path)
    target = path if name in ("m.ckpt", "m.pt") else tmp_path / "c"
    with pytest.raises(UnsafeFileError, match="open"):
        convert(ConvertRequest(path=target, out=tmp_path / "out"))
    assert not made.exists()
    assert check(locate(target)).state == "incomplete"


def test_b84_a_namespace_beside_the_weights_is_data(tmp_path: Path) -> None:
    state = {"a.weight": torch.randn(3), "b.weight": torch.randn(2)}
    torch.save({"args": argparse.Namespace(x=1), "model": state}, tmp_path / "c.pt")
    found, record = converted(tmp_path / "c.pt", tmp_path / "out")
    assert same(found, state)
    assert [entry["name"] for entry in record["left_out"]] == ["args"]


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a\0b"])
def test_names_that_no_file_system_takes_are_refused(tmp_path: Path, name: str) -> None:
    fuzz_seeds.hf_safetensors(tmp_path)
    index = {"weight_map": {"a": name, "b": "model-00001-of-00004.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(tmp_path, tmp_path / "out")
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    fuzz_seeds.zero_2(tmp_path)
    (tmp_path / "latest").write_text(name)
    refused(tmp_path, tmp_path / "out")


# Damage that formats don't show


@pytest.mark.parametrize("layout", ["fsdp", "torch_dcp", "zero_2", "lightning", "hf_bin", "megatron_legacy_checkpoint"])
def test_l1_a_flipped_byte_of_the_source_is_found_by_verification(tmp_path: Path, layout: str) -> None:
    (tmp_path / "c").mkdir()
    seed = fuzz_seeds.SEEDS[layout](tmp_path / "c")
    options = {k: tmp_path / "c" / v if k == "config_dir" else v for k, v in seed.options.items()}
    path = tmp_path / "c" / seed.path
    source = next(iter(plan(ConvertRequest(path=path, out=tmp_path / "out", **options)).plan.tensors)).source
    at = source.pieces[0].offset_bytes
    with open(source.pieces[0].file.path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    converted(path, tmp_path / "out", **options)
    report = verify(tmp_path / "out", against=path, options=VerifyOptions(config_dir=options.get("config_dir")))
    (found,) = (c for c in report.checks if c.name == "checksums in the source")
    assert found.status == "failed"
    assert Path(source.pieces[0].file.path).name in found.detail


@pytest.mark.parametrize("layout", ["fsdp", "torch_dcp", "hf_bin", "zero_3"])
def test_l1_an_undamaged_source_passes(tmp_path: Path, layout: str) -> None:
    (tmp_path / "c").mkdir()
    path = tmp_path / "c" / fuzz_seeds.SEEDS[layout](tmp_path / "c").path
    converted(path, tmp_path / "out")
    report = verify(tmp_path / "out", against=path)
    (found,) = (c for c in report.checks if c.name == "checksums in the source")
    assert (found.status, found.figures["storages"]) != ("passed", 0)
    assert found.status == "passed"


@pytest.mark.parametrize("kind", ["safetensors", "legacy torch"])
def test_l2_a_file_that_ends_in_zeros_is_said_to_and_not_complete_while_it_is_young(tmp_path: Path, kind: str) -> None:
    state = {"a.weight": torch.randn(64, 64), "b.weight": torch.randn(64, 64)}
    path = tmp_path / ("model.safetensors" if kind == "safetensors" else "pytorch_model.bin")
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=False)
    assert check(locate(tmp_path)).state == "complete"
    with open(path, "r+b") as file:
        file.seek(-10_000, os.SEEK_END)
        file.write(bytes(10_000))
    assert check(locate(tmp_path)).state == "in-progress"
    age(tmp_path)
    assert check(locate(tmp_path)).state == "complete"
    _, record = converted(tmp_path, tmp_path / "out")
    assert any("ends in 8192 zero bytes" in note for note in record["notes"])


def test_l2_a_preallocated_torch_zip_is_refused(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.randn(64, 64)}, tmp_path / "pytorch_model.bin")
    with open(tmp_path / "pytorch_model.bin", "r+b") as file:
        file.seek(-10_000, os.SEEK_END)
        file.write(bytes(10_000))
    refused(tmp_path, tmp_path / "out")


def test_l4_nothing_of_ours_loads_through_dcp_whose_errors_are_no_exceptions() -> None:
    import ckptflow

    assert ckptflow.__file__ is not None
    for path in Path(ckptflow.__file__).parent.rglob("*.py"):
        assert "import torch.distributed.checkpoint" not in path.read_text(), path
        assert "from torch.distributed.checkpoint" not in path.read_text(), path


def test_l7_a_strided_view_is_read_over_its_whole_extent(tmp_path: Path) -> None:
    view = torch.arange(20.0).reshape(4, 5)[:, :2]
    torch.save({"v.weight": view, "t.weight": torch.arange(6.0).reshape(2, 3).T}, tmp_path / "pytorch_model.bin")
    found, _ = converted(tmp_path, tmp_path / "out")
    assert same(found, {"v.weight": view, "t.weight": torch.arange(6.0).reshape(2, 3).T})


def test_slices_whose_last_rank_may_be_missing_need_a_config(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    fuzz_seeds.dcp_hf(tmp_path / "c")
    assert inspect_checkpoint(tmp_path / "c").manifest.doubt is not None
    with pytest.raises(UsageError, match="--config"):
        convert(ConvertRequest(path=tmp_path / "c", out=tmp_path / "out"))
    convert(ConvertRequest(path=tmp_path / "c", out=tmp_path / "out", config_dir=tmp_path / "config"))
