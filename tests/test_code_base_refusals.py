"""Models of other code bases that are not the config's, or that transformers' model can't be, are refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptflow.errors import CheckpointError, InconsistentCheckpointError, UnsupportedCheckpointError
from code_base_models import Tensors, as_litgpt, as_torchtitan, as_torchtune, config_of, saved_model
from code_base_runs import as_dcp, as_file, assert_same, llama, run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("layers.1.attention.qkv_linear.wk.weight"), "lacks a tensor that the config's model has"),
        (lambda w: w.update({"layers.0.attention.wq.lora_a.weight": torch.ones(2, 24)}), "merge the adapter"),
        (lambda w: w.update({"output.weight": torch.ones(40, 24)}), "two tensors for one parameter"),
        (lambda w: w.update({"layers.2.ffn_norm.weight": torch.ones(24)}), "tables of torchtitan"),
        (lambda w: w.update({"norm.weight": torch.ones(23)}), "another shape than the config's model"),
        (lambda w: w.pop("lm_head.weight"), "set tie_word_embeddings to true"),
    ],
    ids=["missing", "lora", "two spellings", "a layer more", "shape", "no head"],
)
def test_a_model_that_is_not_the_configs_is_refused(
    change: Callable[[Tensors], Any], message: str, tmp_path: Path
) -> None:
    _, weights = llama(tmp_path)
    change(weights)
    with pytest.raises(CheckpointError) as refused:
        run(as_dcp(weights, tmp_path / "run"), tmp_path)
    assert message in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
    ],
)
def test_a_config_that_the_code_bases_model_can_not_have_is_refused(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    plain = config_of(kind)
    weights = as_torchtitan(saved_model(plain, tmp_path / "plain"), plain)
    config_of(kind, **changes).save_pretrained(tmp_path / "config")
    with pytest.raises(UnsupportedCheckpointError) as refused:
        run(as_dcp(weights, tmp_path / "run"), tmp_path)
    assert message in str(refused.value)


def test_a_litgpt_model_whose_own_config_interleaves_pairs_is_refused(tmp_path: Path) -> None:
    config = config_of("llama")
    saved = saved_model(config, tmp_path / "config")
    source = as_file(as_litgpt(dict(saved), config), tmp_path / "run")
    (tmp_path / "run" / "model_config.yaml").write_text("name: tiny\nrope_interleave: true\n")
    with pytest.raises(UnsupportedCheckpointError, match="rotary pairs lie side by side"):
        run(source, tmp_path)
    (tmp_path / "run" / "model_config.yaml").write_text("name: tiny\nrope_interleave: false\n")
    run(source, tmp_path)
    assert_same(tmp_path / "out", saved)


def test_a_phi_that_turns_a_part_of_its_heads_is_not_torchtunes(tmp_path: Path) -> None:
    config = config_of("phi3", head_dim=8, partial_rotary_factor=0.5)
    source = as_file(as_torchtune(saved_model(config, tmp_path / "config"), config), tmp_path / "run")
    with pytest.raises(UnsupportedCheckpointError, match="turns a part of them"):
        run(source, tmp_path)


def test_square_experts_under_old_names_are_refused(tmp_path: Path) -> None:
    config = config_of("qwen3_moe", moe_intermediate_size=24)
    saved = saved_model(config, tmp_path / "config")
    run(as_dcp(as_torchtitan(dict(saved), config), tmp_path / "new"), tmp_path)
    assert_same(tmp_path / "out", saved)
    with pytest.raises(UnsupportedCheckpointError, match="experts are square"):
        run(as_dcp(as_torchtitan(dict(saved), config, new=False), tmp_path / "old"), tmp_path)


@pytest.mark.parametrize("absurd", [{"num_experts": 10**7, "num_local_experts": 10**7}, {"num_hidden_layers": 10**4}])
def test_a_config_of_absurd_sizes_is_refused_soon(absurd: dict[str, int], tmp_path: Path) -> None:
    config = config_of("qwen3_moe")
    weights = as_torchtitan(saved_model(config, tmp_path / "config"), config)
    path = tmp_path / "config" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **absurd}))
    began = time.monotonic()
    with pytest.raises(CheckpointError):
        run(as_dcp(weights, tmp_path / "run"), tmp_path)
    assert time.monotonic() - began < 20


def test_padding_of_the_vocabulary_is_told_and_not_cut(tmp_path: Path) -> None:
    config = config_of("llama")
    weights = as_litgpt(saved_model(config, tmp_path / "config"), config)
    for name in ("transformer.wte.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], torch.zeros(24, 24)])
    with pytest.raises(InconsistentCheckpointError) as refused:
        run(as_file(weights, tmp_path / "run"), tmp_path)
    assert "set vocab_size to 64" in str(refused.value)


def test_a_tied_head_that_was_trained_apart_is_refused(tmp_path: Path) -> None:
    _, weights = llama(tmp_path, tie_word_embeddings=True)
    weights["lm_head.weight"][3, 3] += 1
    with pytest.raises(InconsistentCheckpointError, match="two copies of a tensor differ"):
        run(as_dcp(weights, tmp_path / "run"), tmp_path)


def test_a_tied_head_is_dropped_by_the_familys_default_too(tmp_path: Path) -> None:
    config = config_of("gemma")
    saved = saved_model(config, tmp_path / "config")
    path = tmp_path / "config" / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "tie_word_embeddings"}))
    weights = as_litgpt(dict(saved), config)
    weights["lm_head.weight"][0, 0] += 1
    with pytest.raises(InconsistentCheckpointError, match="two copies of a tensor differ"):
        run(as_file(weights, tmp_path / "run"), tmp_path)


def test_tensors_that_become_one_must_have_one_dtype(tmp_path: Path) -> None:
    config = config_of("phi3")
    weights = as_torchtune(saved_model(config, tmp_path / "config"), config)
    weights["layers.0.attn.k_proj.weight"] = weights["layers.0.attn.k_proj.weight"].bfloat16()
    with pytest.raises(InconsistentCheckpointError, match="several dtypes"):
        run(as_file(weights, tmp_path / "run"), tmp_path)


@pytest.mark.parametrize("new", [True, False])
def test_a_balancing_bias_is_left_out_only_where_it_chooses_nothing(new: bool, tmp_path: Path) -> None:
    config = config_of("qwen3_moe")
    saved = saved_model(config, tmp_path / "config")
    weights = as_torchtitan(dict(saved), config, new)
    bias = f"layers.1.moe.expert_bias{'_E' if new else ''}"
    weights[bias] = torch.full((4,), 0.25)
    run(as_dcp(weights, tmp_path / "same"), tmp_path)
    assert_same(tmp_path / "out", saved)
    weights[bias] = torch.tensor([0.25, 0.25, 0.25, 0.5])
    with pytest.raises(InconsistentCheckpointError, match="two copies of a tensor differ") as refused:
        run(as_dcp(weights, tmp_path / "apart"), tmp_path, "refused")
    assert "it would choose others" in str(refused.value)


def test_a_family_without_a_table_is_refused_with_those_that_have_one(tmp_path: Path) -> None:
    config = config_of("llama")
    weights = as_torchtune(saved_model(config, tmp_path / "plain"), config)
    config_of("gemma2").save_pretrained(tmp_path / "config")
    with pytest.raises(InconsistentCheckpointError) as refused:
        run(as_dcp(weights, tmp_path / "run"), tmp_path)
    assert "they are those of torchtune, with tables for llama, mistral, gemma, qwen2, phi3" in str(refused.value)
