"""Tiny models under transformers' names, and the same in Megatron's layout: made naively with torch, as a reference.

Knows nothing of ckptflow: the conversion here goes the other way, and cuts and joins real tensors.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

H, HEADS, KV, HD, FFN, VOCAB, EXPERTS, EXPERT_FFN, SHARED = 8, 4, 2, 2, 6, 10, 4, 4, 6
Q_RANK, KV_RANK, NOPE, ROPE, V_DIM = 6, 4, 3, 2, 2
Tensors = dict[str, torch.Tensor]

BASE = {
    "hidden_size": H,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HD,
    "intermediate_size": FFN,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": EXPERTS, "moe_intermediate_size": EXPERT_FFN}
SHARED_MOE = {
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": EXPERT_FFN,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
MLA = {
    "q_lora_rank": Q_RANK,
    "kv_lora_rank": KV_RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": V_DIM,
    "num_key_value_heads": HEADS,
    "head_dim": ROPE,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3-tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": EXPERTS},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **MOE,
        "shared_expert_intermediate_size": SHARED,
        "decoder_sparse_step": 2,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **MOE, "mlp_only_layers": [0]},
    "deepseek_v2-full-q": {"model_type": "deepseek_v2", **SHARED_MOE, **MLA, "q_lora_rank": None},
    "deepseek_v3": {"model_type": "deepseek_v3", **SHARED_MOE, **MLA},
    "kimi_k2": {"model_type": "kimi_k2", **SHARED_MOE, **MLA},
    "glm4_moe": {"model_type": "glm4_moe", **SHARED_MOE, "attention_bias": True, "use_qk_norm": True},
    "glm4_moe-plain": {"model_type": "glm4_moe", **SHARED_MOE},
    "seed_oss": {"model_type": "seed_oss", "attention_bias": True},
    "smollm3-tied": {"model_type": "smollm3", "tie_word_embeddings": True, "pad_token_id": None},
    "gemma": {"model_type": "gemma", "tie_word_embeddings": True},
    "gemma2": {"model_type": "gemma2", "tie_word_embeddings": True},
    "gemma3_text": {"model_type": "gemma3_text", "tie_word_embeddings": True},
}
SANDWICHED = ("gemma2", "gemma3_text")
"""Norms before and after attention and MLP."""
HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text")
EXPERT_BIASES = ("deepseek_v3", "kimi_k2", "glm4_moe")


def config_of(name: str, layers: int = 4, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model."""
    return {**BASE, "num_hidden_layers": layers, **CONFIGS[name], **changes}


def is_sparse(config: dict[str, Any], layer: int) -> bool:
    kind = config["model_type"]
    if kind == "mixtral":
        return True
    if "first_k_dense_replace" in config:
        return layer >= config["first_k_dense_replace"]
    if kind in ("qwen2_moe", "qwen3_moe"):
        return (
            layer not in config.get("mlp_only_layers", []) and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
        )
    return False


def hf_model(config: dict[str, Any]) -> Tensors:
    """Random weights under transformers' names."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, H)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in _layer_shapes(config, layer).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (H,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, H)
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _layer_shapes(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    kind = config["model_type"]
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (H,), "post_attention_layernorm.weight": (H,)}
    if kind in SANDWICHED:
        shapes |= {"pre_feedforward_layernorm.weight": (H,), "post_feedforward_layernorm.weight": (H,)}
    if "kv_lora_rank" in config:
        if config["q_lora_rank"] is None:
            shapes["self_attn.q_proj.weight"] = (HEADS * (NOPE + ROPE), H)
        else:
            shapes |= {
                "self_attn.q_a_proj.weight": (Q_RANK, H),
                "self_attn.q_a_layernorm.weight": (Q_RANK,),
                "self_attn.q_b_proj.weight": (HEADS * (NOPE + ROPE), Q_RANK),
            }
        shapes |= {
            "self_attn.kv_a_proj_with_mqa.weight": (KV_RANK + ROPE, H),
            "self_attn.kv_a_layernorm.weight": (KV_RANK,),
            "self_attn.kv_b_proj.weight": (HEADS * (NOPE + V_DIM), KV_RANK),
            "self_attn.o_proj.weight": (H, HEADS * V_DIM),
        }
    else:
        rows = {"q": HEADS * HD, "k": KV * HD, "v": KV * HD}
        shapes |= {f"self_attn.{p}_proj.weight": (n, H) for p, n in rows.items()}
        if kind in ("qwen2", "qwen2_moe") or config.get("attention_bias"):
            shapes |= {f"self_attn.{p}_proj.bias": (n,) for p, n in rows.items()}
        if config.get("attention_bias") and kind == "llama":
            shapes["self_attn.o_proj.bias"] = (H,)
        shapes["self_attn.o_proj.weight"] = (H, HEADS * HD)
    if kind in HEAD_NORMS or config.get("use_qk_norm"):
        shapes |= {"self_attn.q_norm.weight": (HD,), "self_attn.k_norm.weight": (HD,)}
    return shapes | _mlp_shapes(config, is_sparse(config, layer))


def _gated(
    prefix: str, ffn: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Any]:
    gate, up, down = names
    return {f"{prefix}.{gate}.weight": (ffn, H), f"{prefix}.{up}.weight": (ffn, H), f"{prefix}.{down}.weight": (H, ffn)}


def _mlp_shapes(config: dict[str, Any], sparse: bool) -> dict[str, tuple[int, ...]]:
    kind = config["model_type"]
    if not sparse:
        biases = {"mlp.gate_proj.bias": (FFN,), "mlp.up_proj.bias": (FFN,), "mlp.down_proj.bias": (H,)}
        return _gated("mlp", FFN) | (biases if config.get("mlp_bias") else {})
    if kind == "mixtral":
        shapes = {"block_sparse_moe.gate.weight": (EXPERTS, H)}
        for e in range(EXPERTS):
            shapes |= _gated(f"block_sparse_moe.experts.{e}", FFN, ("w1", "w3", "w2"))
        return shapes
    shapes = {"mlp.gate.weight": (EXPERTS, H)}
    for e in range(EXPERTS):
        shapes |= _gated(f"mlp.experts.{e}", EXPERT_FFN)
    if kind == "qwen2_moe":
        shapes |= _gated("mlp.shared_expert", SHARED) | {"mlp.shared_expert_gate.weight": (1, H)}
    if "n_shared_experts" in config:
        shapes |= _gated("mlp.shared_experts", EXPERT_FFN)
    if kind in EXPERT_BIASES:
        shapes["mlp.gate.e_score_correction_bias"] = (EXPERTS,)
    return shapes


def megatron_layer(hf: Tensors, layer: int, config: dict[str, Any], fused: bool) -> Tensors:
    """One layer under Megatron-Core's names, whole; experts as ``local_experts.N``."""
    own = {n.removeprefix(f"model.layers.{layer}."): t for n, t in hf.items() if n.startswith(f"model.layers.{layer}.")}
    found: Tensors = {}
    kind, sparse = config["model_type"], is_sparse(config, layer)
    mla = "kv_lora_rank" in config
    qkv_norm = "self_attention.linear_qkv.layer_norm_weight" if fused and not mla else "input_layernorm.weight"
    mlp_norm = "mlp.linear_fc1.layer_norm_weight" if fused and not sparse else "pre_mlp_layernorm.weight"
    found[qkv_norm] = own.pop("input_layernorm.weight")
    found[mlp_norm] = own.pop(
        "pre_feedforward_layernorm.weight" if kind in SANDWICHED else "post_attention_layernorm.weight"
    )
    for suffix in ("weight", "bias"):
        parts = [None if mla else own.pop(f"self_attn.{p}_proj.{suffix}", None) for p in "qkv"]
        if parts[0] is not None:
            per_group = [p.view(KV, -1, *p.shape[1:]) for p in parts if p is not None]
            found[f"self_attention.linear_qkv.{suffix}"] = torch.cat(per_group, 1).flatten(0, 1)
    renames = {
        "self_attn.o_proj": "self_attention.linear_proj",
        "self_attn.q_norm": "self_attention.q_layernorm",
        "self_attn.k_norm": "self_attention.k_layernorm",
        "self_attn.q_proj": "self_attention.linear_q_proj",
        "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
        "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
        "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
        "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
        "self_attn.q_a_layernorm": "self_attention.q_layernorm",
        "self_attn.kv_a_layernorm": "self_attention.kv_layernorm",
        "post_attention_layernorm": "self_attention.linear_proj.post_layernorm",
        "post_feedforward_layernorm": "mlp.linear_fc2.post_layernorm",
        "mlp.gate": "mlp.router",
        "block_sparse_moe.gate": "mlp.router",
    }
    if fused and mla:
        if "self_attn.q_a_layernorm.weight" in own:
            found["self_attention.linear_q_up_proj.layer_norm_weight"] = own.pop("self_attn.q_a_layernorm.weight")
        found["self_attention.linear_kv_up_proj.layer_norm_weight"] = own.pop("self_attn.kv_a_layernorm.weight")
    for name in list(own):
        module, _, suffix = name.rpartition(".")
        if module in renames and suffix != "e_score_correction_bias":
            found[f"{renames[module]}.{suffix}"] = own.pop(name)
    if "mlp.gate.e_score_correction_bias" in own:
        found["mlp.router.expert_bias"] = own.pop("mlp.gate.e_score_correction_bias")
    if "mlp.shared_expert_gate.weight" in own:
        found["mlp.shared_experts.gate_weight"] = own.pop("mlp.shared_expert_gate.weight")
    modules = {"mlp": "mlp", "mlp.shared_expert": "mlp.shared_experts", "mlp.shared_experts": "mlp.shared_experts"}
    for e in range(EXPERTS):
        modules[f"mlp.experts.{e}"] = modules[f"block_sparse_moe.experts.{e}"] = f"mlp.experts.local_experts.{e}"
    for module, megatron in modules.items():
        names = ("w1", "w3", "w2") if module.startswith("block") else ("gate_proj", "up_proj", "down_proj")
        for suffix in ("weight", "bias"):
            gate, up, down = (own.pop(f"{module}.{n}.{suffix}", None) for n in names)
            if gate is not None and up is not None and down is not None:
                found[f"{megatron}.linear_fc1.{suffix}"] = torch.cat([gate, up])
                found[f"{megatron}.linear_fc2.{suffix}"] = down
    assert not own, f"not converted: {list(own)}"
    return found


def padded(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Vocabulary padding; Megatron leaves whatever was in memory there."""
    return torch.cat([weight, torch.full((rows - len(weight), *weight.shape[1:]), 1e6)])


def tensor_parallel_part(name: str, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """What one tensor-parallel rank holds."""
    if name.endswith(("layernorm.weight", "layer_norm_weight", "router.weight", "gate_weight", "expert_bias")):
        return tensor
    if ".linear_fc1." in name:
        gate, up = tensor.chunk(2)
        return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(size, 1)[rank]
    if name.endswith(("linear_proj.bias", "linear_fc2.bias", "down_proj.weight")):
        return tensor  # mcore keeps MLA's down projections whole in each rank
    return tensor.chunk(size)[rank]


def args_of(config: dict[str, Any], tp: int = 1, pp: int = 1, ep: int = 1, **changes: Any) -> argparse.Namespace:
    """Megatron-LM's args for a model of that config."""
    fields = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": H,
        "num_attention_heads": HEADS,
        "group_query_attention": True,
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config["head_dim"],
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "apply_layernorm_1p": config["model_type"].startswith("gemma"),
    }
    return argparse.Namespace(**{**fields, **changes})


def save_rank(path: Path, model: dict[str, Any], args: argparse.Namespace, **changes: Any) -> None:
    """One rank's file in Megatron-LM's legacy format."""
    path.mkdir(parents=True)
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 10, **model, "optimizer": {"m": torch.ones(5)}}
    torch.save({**state, **changes}, path / "model_optim_rng.pt")
