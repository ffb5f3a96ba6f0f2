"""Names in memory and in files: the output is named as transformers saves it, whatever the trainer left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, Shard

from ckptflow.convert import convert
from ckptflow.request import ConvertRequest
from ckptflow.transforms.experts import FAMILIES
from ckptflow.validate.reread.fsdp import FsdpRereader
from ckptflow.validate.verify import verify
from rank_writer import mesh_of, save_ranks, sharded
from validation import check_named

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "num_experts": 5,
    "num_local_experts": 5,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
DENSE_FIRST = {**LATENT, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
INDEXED = {**DENSE_FIRST, "index_n_heads": 2, "index_head_dim": 8, "mlp_layer_types": ["dense", "sparse"]}
FULL = {"layer_types": ["full_attention", "full_attention"]}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}
GROUPED = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
HYBRID = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4, "mamba_n_groups": 1}
OWN: dict[str, dict[str, Any]] = {
    "afmoe": {**FULL, "num_dense_layers": 1},
    "cohere2_moe": FULL,
    "deepseek_v2": DENSE_FIRST,
    "deepseek_v3": DENSE_FIRST,
    "deepseek_v32": INDEXED,
    "dots1": {**FULL, **GROUPED, "n_shared_experts": 1},
    "ernie4_5_moe": {"moe_num_experts": 5, "moe_k": 2, "moe_layer_start_index": 1},
    "exaone_moe": {**GROUPED, "num_shared_experts": 1},
    "flex_olmo": {},
    "glm4_moe": GROUPED,
    "glm4_moe_lite": {**DENSE_FIRST, "mlp_layer_types": ["dense", "sparse"]},
    "glm_moe_dsa": INDEXED,
    "granitemoe": {},
    "granitemoehybrid": {**HYBRID, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 12},
    "granitemoeshared": {"shared_intermediate_size": 12},
    "hunyuan_v1_moe": {"moe_topk": [2, 2], "moe_intermediate_size": [12, 12]},
    "jamba": {"mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_offset": 1, "attn_layer_period": 2},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "mimo_v2_flash": {
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        **dict.fromkeys(("v_head_dim", "swa_head_dim", "swa_v_head_dim"), 8),
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
    },
    "minimax": {**FULL, "block_size": 8},
    "minimax_m2": {"rotary_dim": 4},
    "mixtral": {},
    "nemotron_h": {
        **{"layers_block_type": ["mamba", "moe", "attention"], "moe_latent_size": None, "mamba_num_heads": 4},
        **{"mamba_head_dim": 16, "ssm_state_size": 4, "n_groups": 1, "n_group": 1, "topk_group": 1},
        "moe_shared_expert_intermediate_size": 12,
    },
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 12, "decoder_sparse_step": 1},
    "qwen3_5_moe_text": {**LINEAR, "shared_expert_intermediate_size": 12},
    "qwen3_moe": {},
    "qwen3_next": LINEAR,
    "solar_open": {"first_k_dense_replace": 1},
}


RENAMED = ("gpt_neox",)
"""Without experts: families whose names alone differ (``saved_names``)."""
VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16}
WITH_VISION: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "glm4v_moe": (GROUPED, {**VISION, "image_size": 28}),
    "qwen3_5_moe": (OWN["qwen3_5_moe_text"], {**VISION, "num_position_embeddings": 16}),
}


def config_of(kind: str) -> transformers.PreTrainedConfig:
    whole = transformers.CONFIG_MAPPING[kind]()

    def fitting(part: transformers.PreTrainedConfig, sizes: Mapping[str, Any]) -> dict[str, Any]:
        known = part.to_dict()
        return {name: value for name, value in sizes.items() if name in known}

    if kind not in WITH_VISION:
        return type(whole)(**fitting(whole, {**SIZES, **OWN.get(kind, {})}))
    text, vision = WITH_VISION[kind]
    return type(whole)(
        text_config=fitting(whole.text_config, {**SIZES, **text}), vision_config=fitting(whole.vision_config, vision)
    )


def model_of(kind: str) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    loader = transformers.AutoModelForImageTextToText if kind in WITH_VISION else transformers.AutoModelForCausalLM
    model = loader.from_config(config_of(kind))
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape))
    return model


def saved_by_transformers(model: transformers.PreTrainedModel, directory: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    for fqn, value in wanted.items():
        assert torch.equal(found[fqn], value), fqn


@pytest.mark.parametrize("kind", [*OWN, *WITH_VISION, *RENAMED])
def test_the_output_is_what_transformers_saves(tmp_path: Path, kind: str) -> None:
    model = model_of(kind)
    state = model.state_dict()
    wanted = saved_by_transformers(model, tmp_path / "saved")
    assert set(state) != set(wanted)
    checkpoint = tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    save_file({fqn: value.contiguous() for fqn, value in state.items()}, checkpoint / "model.safetensors")
    model.config.save_pretrained(checkpoint)
    convert(ConvertRequest(path=checkpoint, out=tmp_path / "out", dtype="source"))
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), wanted)


def test_every_family_of_the_table_is_held_to_transformers() -> None:
    assert {*OWN, *WITH_VISION} == set(FAMILIES)


@pytest.fixture(params=["qwen3_moe", "nemotron_h", "granitemoe"])
def ranks(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, transformers.PreTrainedModel]:
    """Three ranks of FSDP2, which cut five experts unevenly and some tensors along their second dim."""
    model = model_of(request.param)

    def part(fqn: str, value: torch.Tensor) -> DTensor:
        return sharded(value, mesh_of((3,)), [Shard(1 if fqn.endswith("down_proj") else 0)])

    actor = tmp_path / "global_step_10" / "actor"
    save_ranks(actor, 3, lambda _: {fqn: part(fqn, value) for fqn, value in model.state_dict().items()})
    model.config.save_pretrained(actor / "huggingface")
    return actor, model


def test_experts_of_sharded_stacks_are_put_together_and_proven_by_the_second_reader(
    ranks: tuple[Path, transformers.PreTrainedModel], tmp_path: Path
) -> None:
    actor, model = ranks
    out = tmp_path / "out"
    convert(ConvertRequest(path=actor, out=out))
    wanted = saved_by_transformers(model, tmp_path / "saved")
    kept = ("A_log", ".mixer.D", "e_score_correction_bias")
    cast = {fqn: v if fqn.endswith(kept) else v.to(torch.bfloat16) for fqn, v in wanted.items()}
    assert_same(load_file(out / "model.safetensors"), cast)
    report = verify(out, against=actor, forward=True)
    assert report.failures == ()
    assert check_named(report, "values").figures["source read through"] == FsdpRereader.how, "and through nothing else"


@pytest.mark.parametrize("ranks", ["qwen3_moe", "nemotron_h"], indirect=True)
def test_an_expert_in_another_s_place_is_found_by_the_proof(
    ranks: tuple[Path, transformers.PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptflow.transforms import experts

    actor, _ = ranks
    unbind = experts.unbind
    with monkeypatch.context() as patch:
        patch.setattr(experts, "unbind", lambda source: unbind(source)[::-1])
        convert(ConvertRequest(path=actor, out=tmp_path / "out"))
        failed = {check.name: check.detail for check in verify(tmp_path / "out", against=actor).failures}
    assert "experts.0.up_proj.weight" in failed["values"]


def test_stacks_that_are_quantized_or_not_of_the_family_stay_as_they_are(tmp_path: Path) -> None:
    model = model_of("qwen3_moe")
    state = {fqn: value.contiguous() for fqn, value in model.state_dict().items()}
    for name, change in {
        "quantized": {fqn: v.to(torch.float8_e4m3fn) for fqn, v in state.items() if ".experts." in fqn},
        "transposed": {fqn: v.transpose(1, 2).contiguous() for fqn, v in state.items() if ".experts." in fqn},
    }.items():
        checkpoint = tmp_path / name / "checkpoint-1"
        checkpoint.mkdir(parents=True)
        save_file({**state, **change}, checkpoint / "model.safetensors")
        model.config.save_pretrained(checkpoint)
        convert(ConvertRequest(path=checkpoint, out=tmp_path / name / "out", dtype="source"))
        assert set(load_file(tmp_path / name / "out" / "model.safetensors")) == set(state)
