"""Hugging Face directories: the files that transformers would load are read, all else is named or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from ckptflow.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    CorruptFileError,
    IncompleteCheckpointError,
    InconsistentCheckpointError,
    NotACheckpointError,
    UnsafeFileError,
    UnsupportedCheckpointError,
)
from ckptflow.formats.registry import check, locate
from reading import as_numpy, assert_same_bits, manifest_of, read_source

FULL = {
    "embed.weight": torch.arange(12.0).reshape(4, 3),
    "norm.weight": torch.ones(3),
    "head.weight": torch.zeros(4, 3),
}


def write_config(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "llama"}')


def write_shards(directory: Path, kind: str = "safetensors", index: bool = True) -> dict[str, str]:
    """Three shards of one tensor each; gives the weight_map."""
    stem = "model" if kind == "safetensors" else "pytorch_model"
    weight_map = {}
    for number, (name, tensor) in enumerate(FULL.items(), start=1):
        file = f"{stem}-{number:05d}-of-00003.{kind}"
        weight_map[name] = file
        if kind == "safetensors":
            save_file({name: tensor}, directory / file)
        else:
            torch.save({name: tensor}, directory / file)
    if index:
        write_index(directory, weight_map, f"{stem}.{kind}.index.json")
    write_config(directory)
    return weight_map


def write_index(directory: Path, weight_map: dict[str, Any], name: str = "model.safetensors.index.json") -> None:
    (directory / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("index", [True, False])
def test_shards_come_back_with_and_without_their_index(tmp_path: Path, kind: str, index: bool) -> None:
    write_shards(tmp_path, kind, index)
    manifest = manifest_of(tmp_path)
    assert_same_bits(manifest.tensors, as_numpy(FULL))
    assert manifest.config_dir == tmp_path
    assert bool(manifest.notes) is not index
    assert check(locate(tmp_path)).state == "complete"


@pytest.mark.parametrize("legacy", [True, False])
def test_a_single_bin_file_of_either_torch_format_keeps_its_ties(tmp_path: Path, legacy: bool) -> None:
    state = {**FULL, "alias.weight": FULL["embed.weight"], "view.weight": FULL["embed.weight"][1:3]}
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    manifest = manifest_of(tmp_path)
    assert_same_bits(manifest.tensors, as_numpy({k: v for k, v in state.items() if k != "alias.weight"}))
    assert manifest.ties == {"alias.weight": "embed.weight"}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "consolidated.pth", "weights.pt"])
def test_a_single_file_may_be_named_itself(tmp_path: Path, name: str) -> None:
    save = save_file if name.endswith("safetensors") else torch.save
    save(FULL, tmp_path / name)
    assert_same_bits(manifest_of(tmp_path / name).tensors, as_numpy(FULL))


@pytest.mark.parametrize("name", ["training_args.bin", "optimizer.pt", "rng_state_0.pth", "scheduler.pt"])
def test_trainer_files_are_never_weights(tmp_path: Path, name: str) -> None:
    torch.save(FULL, tmp_path / name)
    with pytest.raises(NotACheckpointError):
        locate(tmp_path / name)
    with pytest.raises(NotACheckpointError):
        locate(tmp_path)
    save_file(FULL, tmp_path / "model.safetensors")
    (tmp_path / "zero_to_fp32.py").write_text("raise SystemExit('run')")
    manifest = manifest_of(tmp_path)
    assert_same_bits(manifest.tensors, as_numpy(FULL))
    assert {entry.name for entry in manifest.left_out} == {name, "zero_to_fp32.py"}


def test_a_directory_with_config_and_tokenizer_only_is_no_model(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(NotACheckpointError):
        locate(tmp_path)


def test_safetensors_win_over_a_stale_bin_with_a_note(tmp_path: Path) -> None:
    torch.save({name: tensor + 1 for name, tensor in FULL.items()}, tmp_path / "pytorch_model.bin")
    save_file(FULL, tmp_path / "model.safetensors")
    manifest = manifest_of(tmp_path)
    assert_same_bits(manifest.tensors, as_numpy(FULL))
    assert any("pytorch_model.bin" in note for note in manifest.notes)
    assert [entry.name for entry in manifest.left_out] == ["pytorch_model.bin"]


@pytest.mark.parametrize("name", ["model.fp16.safetensors", "pytorch_model.fp16.bin"])
def test_a_variant_alone_is_read_and_the_default_wins_over_it(tmp_path: Path, name: str) -> None:
    half = {fqn: tensor.half() for fqn, tensor in FULL.items()}
    save = save_file if name.endswith("safetensors") else torch.save
    save(half, tmp_path / name)
    assert_same_bits(manifest_of(tmp_path).tensors, as_numpy(half))
    save_file(FULL, tmp_path / "model.safetensors")
    manifest = manifest_of(tmp_path)
    assert_same_bits(manifest.tensors, as_numpy(FULL))
    assert any(name in note for note in manifest.notes)


def test_sharded_variants_are_read_by_either_way_of_naming(tmp_path: Path) -> None:
    for directory, file in (("new", "model.fp16-0000{}-of-00002"), ("old", "model-0000{}-of-00002.fp16")):
        (tmp_path / directory).mkdir()
        for number, name in enumerate(("embed.weight", "norm.weight"), start=1):
            save_file({name: FULL[name]}, tmp_path / directory / f"{file.format(number)}.safetensors")
        assert set(manifest_of(tmp_path / directory).tensors) == {"embed.weight", "norm.weight"}


def test_several_variants_without_a_default_are_ambiguous(tmp_path: Path) -> None:
    for variant in ("fp16", "ema"):
        save_file(FULL, tmp_path / f"model.{variant}.safetensors")
    with pytest.raises(AmbiguousCheckpointError, match="variants"):
        manifest_of(tmp_path)
    assert set(manifest_of(tmp_path / "model.ema.safetensors").tensors) == set(FULL)


def test_a_single_file_wins_over_a_half_dead_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    save_file(FULL, tmp_path / "model.safetensors")
    manifest = manifest_of(tmp_path)
    assert_same_bits(manifest.tensors, as_numpy(FULL))
    assert any("index" in note for note in manifest.notes)


def test_a_single_file_beside_whole_shards_is_ambiguous(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file(FULL, tmp_path / "model.safetensors")
    with pytest.raises(AmbiguousCheckpointError, match="two sets"):
        manifest_of(tmp_path)


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_further_models_of_accelerates_save_state_are_listed_as_what_they_are(tmp_path: Path, safe: bool) -> None:
    accelerator = Accelerator(cpu=True)
    first, second = (accelerator.prepare(torch.nn.Linear(3, size)) for size in (2, 4))
    accelerator.save_state(str(tmp_path), safe_serialization=safe)
    manifest = manifest_of(tmp_path)
    assert_same_bits(manifest.tensors, as_numpy(first.state_dict()))
    (other,) = [entry for entry in manifest.left_out if "another model of the same save" in entry.reason]
    assert_same_bits(manifest_of(tmp_path / other.name).tensors, as_numpy(second.state_dict()))


def test_shards_that_the_index_does_not_name_are_left_out_with_a_note(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"old.weight": torch.ones(1)}, tmp_path / "model-00004-of-00004.safetensors")
    manifest = manifest_of(tmp_path)
    assert_same_bits(manifest.tensors, as_numpy(FULL))
    assert any("model-00004-of-00004" in note for note in manifest.notes)
    assert [entry.name for entry in manifest.left_out] == ["model-00004-of-00004.safetensors"]


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_incomplete_and_a_half_written_one_is_pointed_at(tmp_path: Path, index: bool) -> None:
    write_shards(tmp_path, index=index)
    last = tmp_path / "model-00003-of-00003.safetensors"
    last.rename(tmp_path / f"{last.name}.tmp")
    with pytest.raises(IncompleteCheckpointError) as error:
        manifest_of(tmp_path)
    assert ".tmp" in str(error.value)
    assert check(locate(tmp_path)).state == "in-progress", "its files are young"


@pytest.mark.parametrize(
    "changes",
    [
        {"ghost.weight": "model-00001-of-00003.safetensors"},
        {"embed.weight": "model-00002-of-00003.safetensors"},
        {"embed.weight": None},
    ],
    ids=str,
)
def test_an_index_that_says_other_than_the_files_is_refused(tmp_path: Path, changes: dict[str, str | None]) -> None:
    weight_map = {**write_shards(tmp_path), **changes}
    write_index(tmp_path, {fqn: name for fqn, name in weight_map.items() if name is not None})
    with pytest.raises(InconsistentCheckpointError):
        manifest_of(tmp_path)


@pytest.mark.parametrize("target", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "a\\b", "a\0b"])
def test_an_index_that_leads_out_of_the_directory_is_refused(tmp_path: Path, target: str) -> None:
    weight_map = write_shards(tmp_path)
    write_index(tmp_path, {**weight_map, "head.weight": target})
    with pytest.raises(UnsafeFileError):
        manifest_of(tmp_path)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", IncompleteCheckpointError),
        ("{", CorruptFileError),
        ("[]", CorruptFileError),
        ('{"weight_map": []}', CorruptFileError),
        ('{"weight_map": {"a": 1}}', CorruptFileError),
        ('{"weight_map": {"a": "b", "a": "c"}}', CorruptFileError),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, text: str, kind: type[CheckpointError]) -> None:
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(kind):
        manifest_of(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file(FULL, tmp_path / f"model-0000{number}-of-00002.safetensors")
    with pytest.raises(InconsistentCheckpointError, match="two weight files"):
        manifest_of(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_empty_files_are_incomplete(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(IncompleteCheckpointError):
        manifest_of(tmp_path)
    assert check(locate(tmp_path)).state == "in-progress", "its files are young"


def test_a_shard_that_is_a_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_shards(model)
    last = model / "model-00003-of-00003.safetensors"
    last.rename(tmp_path / "elsewhere.safetensors")
    last.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(UnsafeFileError):
        manifest_of(model)


def test_one_rank_s_shards_in_a_bin_file_are_refused(tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard

    from rank_writer import as_rank, mesh_of, sharded

    with as_rank(0, 2):
        torch.save({"w": sharded(torch.zeros(4, 2), mesh_of([2]), [Shard(0)])}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedCheckpointError, match="one rank's shard"):
        manifest_of(tmp_path)


@pytest.mark.parametrize("value", [[torch.zeros(2)], {"ema": {"w": torch.zeros(2)}}, {"epoch": 3}], ids=str)
def test_torch_files_that_are_no_state_dicts_are_refused(tmp_path: Path, value: object) -> None:
    torch.save(value, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError):
        manifest_of(tmp_path)


def test_a_trainer_s_checkpoint_is_in_progress_until_its_last_file_is_there(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint-20"
    directory.mkdir()
    save_file(FULL, directory / "model.safetensors")
    assert check(locate(directory)).state == "in-progress"
    assert manifest_of(directory).global_step == 20
    (directory / "trainer_state.json").write_text("{}")
    assert check(locate(directory)).state == "complete"


def test_conjugate_and_meta_tensors_are_refused(tmp_path: Path) -> None:
    for name, tensor in (("conj", torch.ones(2, dtype=torch.complex64).conj()), ("meta", torch.ones(2, device="meta"))):
        torch.save({"w": tensor}, tmp_path / f"{name}.pt")
        with pytest.raises(UnsupportedCheckpointError):
            manifest_of(tmp_path / f"{name}.pt")


def test_names_of_a_wrapped_model_are_never_taken_as_they_are(tmp_path: Path) -> None:
    save_file(
        {
            "base_model.model.q.base_layer.weight": torch.zeros(4, 3),
            "base_model.model.q.lora_A.default.weight": torch.zeros(2, 3),
            "base_model.model.q.lora_B.default.weight": torch.zeros(4, 2),
        },
        tmp_path / "model.safetensors",
    )
    manifest = manifest_of(tmp_path)
    assert manifest.adapter is not None
    assert manifest.adapter.config["r"] == 2
    assert "lora_alpha" not in manifest.adapter.config
    assert not manifest.adapter.separate


def test_strided_and_sliced_tensors_are_read_whole(tmp_path: Path) -> None:
    big = torch.arange(20.0).reshape(4, 5)
    torch.save({"columns": big[:, :2], "turned": big.t(), "repeated": torch.ones(1).expand(3)}, tmp_path / "a.pt")
    tensors = manifest_of(tmp_path / "a.pt").tensors
    assert read_source(tensors["columns"]).tolist() == big[:, :2].tolist()
    assert read_source(tensors["turned"]).tolist() == big.t().tolist()
    assert read_source(tensors["repeated"]).tolist() == [1.0, 1.0, 1.0]
