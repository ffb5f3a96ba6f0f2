"""Megatron-LM's legacy checkpoints: cut by a naive conversion, read back as windows, compared bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptflow.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    InconsistentCheckpointError,
    UnsupportedCheckpointError,
    UsageError,
)
from ckptflow.formats.base import ReadOptions
from ckptflow.formats.megatron_legacy import MegatronLegacyCheckpoint
from ckptflow.manifest import CheckpointManifest
from megatron_legacy_writer import write
from megatron_models import CONFIGS, H, Tensors, args_of, config_of
from reading import read_source

FORMAT = MegatronLegacyCheckpoint()


def read(out: Path) -> CheckpointManifest:
    (location,) = FORMAT.find(out)
    return FORMAT.read(location, ReadOptions(config_dir=out.parent / "config"))


def assert_model(manifest: CheckpointManifest, hf: Tensors) -> None:
    assert set(manifest.tensors) == set(hf)
    for name, tensor in hf.items():
        assert torch.equal(torch.from_numpy(read_source(manifest.tensors[name])), tensor), name
    for check in manifest.equal:
        assert read_source(check.first).tobytes() == read_source(check.second).tobytes(), check.fqn


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 2, 1)], ids=["one rank", "tp 2 pp 2"])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_comes_back_bit_for_bit(
    tmp_path: Path, family: str, grid: tuple[int, int, int], fused: bool
) -> None:
    out, hf = write(tmp_path, config_of(family), grid, fused=fused)
    manifest = read(out)
    assert set(manifest.tensors) == set(hf)
    assert_model(manifest, {name: hf[name] for name in manifest.tensors})
    (location,) = FORMAT.find(out)
    assert FORMAT.check(location).state == "complete"
    assert manifest.world_size == grid[0] * grid[1]


@pytest.mark.parametrize("style", ["sequential", "te", "grouped"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_expert_parallel_ranks_hold_experts_in_any_of_three_ways(tmp_path: Path, family: str, style: str) -> None:
    out, hf = write(tmp_path, config_of(family), (2, 2, 2), experts=style)
    manifest = read(out)
    assert_model(manifest, {name: hf[name] for name in manifest.tensors})
    assert len(manifest.tensors) == len(hf)
    replicated = {check.fqn for check in manifest.equal}
    assert "decoder.layers.0.self_attention.linear_proj.weight" in replicated  # dense weights of both expert ranks


def test_expert_ranks_without_pipeline_ranks_have_names_of_two_parts(tmp_path: Path) -> None:
    out, hf = write(tmp_path, config_of("mixtral"), (1, 1, 2))
    assert sorted(path.name for path in out.iterdir()) == ["mp_rank_00_000", "mp_rank_00_001"]
    assert_model(read(out), hf)


def test_virtual_stages_interleave(tmp_path: Path) -> None:
    out, hf = write(tmp_path, config_of("qwen2", layers=8), (2, 2, 1), stages=2)
    assert_model(read(out), hf)


def test_a_tied_embedding_must_equal_the_last_stages_copy(tmp_path: Path) -> None:
    out, _ = write(tmp_path, config_of("qwen3-tied"), (1, 2, 1))
    manifest = read(out)
    assert manifest.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    (check,) = (check for check in manifest.equal if check.fqn == "lm_head.weight")
    assert read_source(check.first).tobytes() == read_source(check.second).tobytes()
    assert check.second.shape[0] == check.first.shape[0] == 10


def test_a_config_is_needed(tmp_path: Path) -> None:
    out, _ = write(tmp_path, config_of("llama"))
    (location,) = FORMAT.find(out)
    with pytest.raises(UsageError, match=r"no config\.json"):
        FORMAT.read(location, ReadOptions())


def test_a_missing_rank_is_incomplete(tmp_path: Path) -> None:
    out, _ = write(tmp_path, config_of("llama"), (2, 2, 1))
    (out / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    (location,) = FORMAT.find(out)
    assert FORMAT.check(location).state == "incomplete"
    with pytest.raises(IncompleteCheckpointError):
        read(out)
    (out / "mp_rank_01_001").rmdir()
    with pytest.raises(IncompleteCheckpointError, match="1 of 4 ranks"):
        read(out)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_attention_heads": 2, "num_key_value_heads": 3}, CheckpointError),
        ({"num_attention_heads": 6, "num_key_value_heads": 1}, InconsistentCheckpointError),
        ({"num_hidden_layers": 5}, InconsistentCheckpointError),
        ({"vocab_size": 40}, InconsistentCheckpointError),
        ({"model_type": "phi3"}, UnsupportedCheckpointError),
        ({"model_type": "qwen2"}, InconsistentCheckpointError),
        ({"model_type": "gemma"}, UnsupportedCheckpointError),
        ({"intermediate_size": 12}, InconsistentCheckpointError),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_of_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], error: type[Exception]) -> None:
    out, _ = write(tmp_path, config_of("llama"), (2, 1, 1))
    (tmp_path / "config" / "config.json").write_text(json.dumps(config_of("llama") | changes))
    with pytest.raises(error):
        read(out)


def test_an_expert_without_weights_is_refused(tmp_path: Path) -> None:
    out, _ = write(tmp_path, config_of("mixtral"))
    edit(out / "mp_rank_00", lambda s: s["model"].pop("decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"))
    with pytest.raises(InconsistentCheckpointError, match="lacks a tensor"):
        read(out)


def test_a_tensor_that_no_table_knows_is_refused(tmp_path: Path) -> None:
    out, _ = write(tmp_path, config_of("llama"))
    edit(out / "mp_rank_00", lambda s: s["model"].update({"decoder.layers.0.adapter.weight": torch.ones(2)}))
    with pytest.raises(UnsupportedCheckpointError, match="don't know"):
        read(out)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"checkpoint_version": 1.0}, UnsupportedCheckpointError),
        ({"iteration": 20}, InconsistentCheckpointError),
        ({"args": args_of(config_of("llama"), 2, 2)}, InconsistentCheckpointError),
    ],
    ids=["old QKV order", "another step", "another grid"],
)
def test_ranks_of_other_saves_are_refused(tmp_path: Path, changes: dict[str, Any], error: type[Exception]) -> None:
    out, _ = write(tmp_path, config_of("llama"), (2, 1, 1))
    edit(out / "mp_rank_01", lambda state: state.update(changes))
    with pytest.raises(error):
        read(out)


def test_ranks_that_a_wider_run_left_are_refused(tmp_path: Path) -> None:
    out, _ = write(tmp_path, config_of("llama"), (2, 1, 1))
    shutil.copytree(out / "mp_rank_01", out / "mp_rank_02")
    with pytest.raises(InconsistentCheckpointError, match="did not have"):
        read(out)


def test_the_optimizers_of_data_parallel_ranks_have_directories_of_their_own_in_older_saves(tmp_path: Path) -> None:
    out, hf = write(tmp_path, config_of("llama"), (2, 1, 1))
    for rank in ("mp_rank_00", "mp_rank_01"):
        (out / rank / "model_optim_rng.pt").rename(out / rank / "model_rng.pt")
        for dp in range(2):
            (out / f"{rank}_{dp:03d}").mkdir()
            torch.save({"optimizer": torch.ones(5)}, out / f"{rank}_{dp:03d}" / "optim.pt")
    manifest = read(out)
    assert_model(manifest, hf)
    assert "optim.pt" in {entry.name for entry in manifest.left_out}


def swap(out: Path, *pairs: tuple[str, str]) -> None:
    for one, other in pairs:
        (out / one).rename(out / "between")
        (out / other).rename(out / one)
        (out / "between").rename(out / other)


def test_swapped_pipeline_stages_are_refused(tmp_path: Path) -> None:
    out, _ = write(tmp_path, config_of("llama"), (2, 2, 1))
    swap(out, ("mp_rank_00_000", "mp_rank_00_001"), ("mp_rank_01_000", "mp_rank_01_001"))
    with pytest.raises(InconsistentCheckpointError, match="not in the model's order"):
        read(out)


@pytest.mark.parametrize("pair", [("mp_rank_00_001", "mp_rank_01_001"), ("mp_rank_00_001", "mp_rank_00_002")])
def test_a_rank_in_another_ranks_directory_is_refused_where_args_tell_the_rank(
    tmp_path: Path, pair: tuple[str, str]
) -> None:
    out, hf = write(tmp_path, config_of("llama"), (2, 4, 1))
    for number, name in enumerate(f"mp_rank_{tp:02d}_{pp:03d}" for pp in range(4) for tp in range(2)):
        edit(out / name, lambda state, rank=3 * number: setattr(state["args"], "rank", rank))
    assert_model(read(out), hf)
    swap(out, pair)
    with pytest.raises(InconsistentCheckpointError, match="saved by another rank"):
        read(out)


def test_what_each_rank_was_told_is_held_against_the_config(tmp_path: Path) -> None:
    out, _ = write(tmp_path, config_of("llama"), (2, 1, 1))
    edit(out / "mp_rank_01", lambda state: setattr(state["args"], "num_query_groups", 4))
    with pytest.raises(InconsistentCheckpointError, match="num_query_groups"):
        read(out)


def test_names_from_before_megatron_core_are_read(tmp_path: Path) -> None:
    out, hf = write(tmp_path, config_of("llama"))
    edit(out / "mp_rank_00", lambda state: state.update(model=oldest_names(state["model"])))
    assert_model(read(out), hf)


def oldest_names(model: Tensors) -> dict[str, Any]:
    """As Megatron-LM named them before its blocks had both self- and cross-attention."""
    renames = {
        "self_attention.linear_qkv": "attention.query_key_value",
        "self_attention.linear_proj": "attention.dense",
        "linear_fc1": "dense_h_to_4h",
        "linear_fc2": "dense_4h_to_h",
        "pre_mlp_layernorm": "post_attention_layernorm",
    }
    layers = {}
    for name, tensor in model.items():
        for new, old in renames.items():
            name = name.replace(new, old)
        layers[name.removeprefix("decoder.")] = tensor
    embedding = {"word_embeddings": {"weight": layers.pop("embedding.word_embeddings.weight")}}
    head = {"weight": layers.pop("output_layer.weight")}
    return {"language_model": {"embedding": embedding, "transformer": layers, "output_layer": head}}


def edit(rank: Path, change: Any) -> None:
    """Load the file that this test wrote, change it, write it back."""
    state = torch.load(rank / "model_optim_rng.pt", weights_only=False)
    change(state)
    torch.save(state, rank / "model_optim_rng.pt")


def test_a_value_head_becomes_score(tmp_path: Path) -> None:
    config = config_of("llama", architectures=["LlamaForTokenClassification"], id2label={"0": "LABEL_0"})
    out, hf = write(tmp_path, config, (2, 1, 1))
    head = torch.randn(1, H)
    for rank in ("mp_rank_00", "mp_rank_01"):
        edit(out / rank, lambda s: s["model"].update({"output_layer.weight": head, "output_layer.bias": torch.ones(1)}))
    del hf["lm_head.weight"]
    assert_model(read(out), {**hf, "score.weight": head, "score.bias": torch.ones(1)})
