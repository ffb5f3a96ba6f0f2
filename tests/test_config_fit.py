"""Tensors under the names of another code base are not written beside a config.json that describes other names."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, LongcatFlashConfig

from checkpoints import TINY, llama_values
from ckptflow.convert import convert
from ckptflow.errors import IncompleteCheckpointError, InconsistentCheckpointError
from ckptflow.request import ConvertRequest
from rank_writer import mesh_of, save_ranks, sharded

Weights = dict[str, torch.Tensor]
# https://github.com/allenai/OLMo-core (src/olmo_core/nn/hf/convert.py)
OLMO_CORE = {
    "model.embed_tokens": "embeddings",
    "model.norm": "lm_head.norm",
    "lm_head": "lm_head.w_out",
    "model.layers": "blocks",
    "self_attn.q_proj": "attention.w_q",
    "self_attn.k_proj": "attention.w_k",
    "self_attn.v_proj": "attention.w_v",
    "self_attn.o_proj": "attention.w_out",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feed_forward_norm",
}
# As litgpt's, but with q, k and v apart: the head has transformers' name.
LIKE_LITGPT = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "model.layers": "transformer.h",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.o_proj": "attn.proj",
    "mlp.gate_proj": "mlp.fc_1",
    "mlp.up_proj": "mlp.fc_2",
    "mlp.down_proj": "mlp.proj",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
}


def renamed(names: Mapping[str, str]) -> Weights:
    pattern = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    return {pattern.sub(lambda m: names[m[0]], fqn): value for fqn, value in llama_values(TINY, 3).items()}


def as_dcp(weights: Weights, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**weights, "train_state": {"step": torch.tensor(3)}}, checkpoint_id=path / "step-3", no_dist=True)
    return path / "step-3"


def as_torch_file(weights: Weights, path: Path) -> Path:
    torch.save({"model": weights, "step": 3}, path / "lit_model.pth")
    return path / "lit_model.pth"


def as_rank_files(weights: Weights, path: Path) -> Path:
    def state(_: int) -> dict[str, DTensor]:
        mesh = mesh_of([2], ["fsdp"])
        return {fqn: sharded(full, mesh, [Shard(0)]) for fqn, full in weights.items()}

    return save_ranks(path, 2, state)


def run_directory(tmp_path: Path) -> Path:
    """A directory from which the config is not found."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    directory = tmp_path / "config"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TINY))
    return directory


@pytest.mark.parametrize("names", [OLMO_CORE, LIKE_LITGPT], ids=["olmo-core", "like litgpt"])
@pytest.mark.parametrize("save", [as_dcp, as_torch_file, as_rank_files])
def test_names_of_another_code_base_are_refused_beside_a_config_and_kept_without_one(
    tmp_path: Path, config: Path, names: Mapping[str, str], save: Callable[[Weights, Path], Path]
) -> None:
    weights = renamed(names)
    source = save(weights, run_directory(tmp_path))
    with pytest.raises(InconsistentCheckpointError, match=r"not those of the model that config\.json describes"):
        convert(ConvertRequest(path=source, out=tmp_path / "out", config_dir=config))
    assert not (tmp_path / "out").exists()
    if save is not as_rank_files or names is OLMO_CORE:
        record = convert(ConvertRequest(path=source, out=tmp_path / "kept"))
        assert set(record["tensors"]) == set(weights)


def test_a_model_with_a_head_of_its_own_is_not_refused(tmp_path: Path, config: Path) -> None:
    weights = llama_values(TINY, 3)
    weights["classifier.weight"] = weights.pop("lm_head.weight")[:2]
    record = convert(
        ConvertRequest(path=as_dcp(weights, run_directory(tmp_path)), out=tmp_path / "out", config_dir=config)
    )
    assert set(record["tensors"]) == set(weights)


@pytest.mark.parametrize("save", [as_dcp, as_torch_file, as_rank_files])
def test_one_of_several_files_of_a_model_is_not_the_model(
    tmp_path: Path, config: Path, save: Callable[[Weights, Path], Path]
) -> None:
    half = {fqn: value for fqn, value in llama_values(TINY, 3).items() if ".layers.1." not in fqn}
    with pytest.raises(IncompleteCheckpointError, match=r"no layers\.1"):
        convert(ConvertRequest(path=save(half, run_directory(tmp_path)), out=tmp_path / "out", config_dir=config))


def test_a_model_whose_config_counts_its_layers_twice_is_whole(tmp_path: Path) -> None:
    config = LongcatFlashConfig(
        **{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64, "q_lora_rank": 8},
        **{"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "ffn_hidden_size": 24},
        **{"expert_ffn_hidden_size": 12, "n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 2},
    )
    assert config.num_hidden_layers == 4
    config.save_pretrained(tmp_path / "config")
    weights = dict(AutoModelForCausalLM.from_config(config).state_dict())
    source = as_torch_file(weights, run_directory(tmp_path))
    record = convert(ConvertRequest(path=source, out=tmp_path / "out", config_dir=tmp_path / "config"))
    assert set(record["tensors"]) == set(weights)
