"""Tiny models of transformers, and the same under the names and row orders of torchtitan, torchtune and litgpt.

Knows nothing of ckptflow: the conversion here goes the other way, with ``view``, ``transpose`` and ``cat`` on real
tensors, as the importers of the code bases do (torchtitan's state_dict_adapter.py ``from_hf``, torchtune's
``hf_to_tune``, litgpt's convert_hf_checkpoint.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
OWN: dict[str, dict[str, Any]] = {
    "gemma": {"tie_word_embeddings": True, "head_dim": 8},
    "gemma2": {"tie_word_embeddings": True, "head_dim": 8},
    "gemma3_text": {"tie_word_embeddings": True, "head_dim": 8},
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": [0], "decoder_sparse_step": 1},
    "mixtral": EXPERTS,
    "deepseek_v3": {
        **{"n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 10},
        **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "head_dim": 4},
        **{"q_lora_rank": 8, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 3, "v_head_dim": 5},
    },
    "gpt_neox": {"num_key_value_heads": 4},
}


def config_of(kind: str, **changes: Any) -> transformers.PreTrainedConfig:
    """A config that transformers builds a tiny model from."""
    made = transformers.CONFIG_MAPPING[kind]()
    known = set(made.to_dict())
    sizes = {name: value for name, value in {**SIZES, **OWN.get(kind, {})}.items() if name in known}
    return type(made)(**{**sizes, **changes})


def saved_model(config: transformers.PreTrainedConfig, directory: Path) -> Tensors:
    """Random weights under the names that transformers saves; leaves config.json in ``directory``."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape))
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def head_dim(config: transformers.PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def groups_of(config: transformers.PreTrainedConfig) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def side_by_side(weight: torch.Tensor, head: int) -> torch.Tensor:
    """Halves of each head as pairs of neighbours: Meta's order out of transformers'."""
    return weight.view(-1, 2, head // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()


def renamed(saved: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> Tensors:
    """All tensors by the one entry whose name in transformers fits; ``#`` is a layer's number, ``%`` an expert's."""
    result: Tensors = {}
    for fqn, value in saved.items():
        for hf, own in names.items():
            match = re.fullmatch(re.escape(hf).replace(r"\#", r"(?P<n>\d+)").replace("%", r"(?P<e>\d+)"), fqn)
            if match is not None:
                numbers = match.groupdict()
                result[own.replace("#", numbers.get("n", "")).replace("%", numbers.get("e", ""))] = value
                break
        else:
            raise AssertionError(f"not converted: {fqn}")
    return result


def with_head(saved: Tensors) -> Tensors:
    """A tied head as a tensor of its own, as most code bases save it."""
    if "lm_head.weight" in saved or "model.embed_tokens.weight" not in saved:
        return saved
    return {**saved, "lm_head.weight": saved["model.embed_tokens.weight"].clone()}


def as_torchtitan(saved: Tensors, config: transformers.PreTrainedConfig, new: bool = True) -> Tensors:
    """torchtitan 0.3, or 0.2, whose names of Llama are Meta's."""
    qkv, inner, bias = ("qkv_linear.", "routed_experts.inner_experts.", "_E") if new else ("", "experts.", "")
    stacks = {"w1": "w1_EFD", "w2": "w2_EDF", "w3": "w3_EFD"} if new else {"w1": "w1", "w2": "w2", "w3": "w3"}
    layer, hf = "layers.#.", "model.layers.#."
    names = {
        "model.embed_tokens.weight": "tok_embeddings.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "lm_head.weight" if new else "output.weight",
        f"{hf}input_layernorm.weight": f"{layer}attention_norm.weight",
        f"{hf}post_attention_layernorm.weight": f"{layer}ffn_norm.weight",
        f"{hf}self_attn.o_proj.weight": f"{layer}attention.wo.weight",
        f"{hf}self_attn.q_norm.weight": f"{layer}attention.q_norm.weight",
        f"{hf}self_attn.k_norm.weight": f"{layer}attention.k_norm.weight",
        f"{hf}self_attn.q_a_proj.weight": f"{layer}attention.wq_a.weight",
        f"{hf}self_attn.q_a_layernorm.weight": f"{layer}attention.q_norm.weight",
        f"{hf}self_attn.q_b_proj.weight": f"{layer}attention.wq_b.weight",
        f"{hf}self_attn.kv_a_proj_with_mqa.weight": f"{layer}attention.wkv_a.weight",
        f"{hf}self_attn.kv_a_layernorm.weight": f"{layer}attention.kv_norm.weight",
        f"{hf}self_attn.kv_b_proj.weight": f"{layer}attention.wkv_b.weight",
        f"{hf}mlp.gate.weight": f"{layer}moe.router.gate.weight",
        f"{hf}mlp.gate.e_score_correction_bias": f"{layer}moe.expert_bias{bias}",
        f"{hf}mlp.experts.%.gate_proj.weight": f"{layer}moe.{inner}%.w1",
        f"{hf}mlp.experts.%.down_proj.weight": f"{layer}moe.{inner}%.w2",
        f"{hf}mlp.experts.%.up_proj.weight": f"{layer}moe.{inner}%.w3",
    }
    plain = "" if config.model_type == "deepseek_v3" else qkv
    names |= {f"{hf}self_attn.{p}_proj.weight": f"{layer}attention.{plain}w{p}.weight" for p in "qkv"}
    for own, theirs in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        names[f"{hf}mlp.{theirs}.weight"] = f"{layer}feed_forward.{own}.weight"
        names[f"{hf}mlp.shared_experts.{theirs}.weight"] = f"{layer}moe.shared_experts.{own}.weight"
    found = renamed(with_head(saved), names)
    if config.model_type == "llama":
        for name in [n for n in found if re.search(r"\.w[qk]\.weight$", n)]:
            found[name] = side_by_side(found[name], head_dim(config))
    return _stack(found, inner, stacks)


def _stack(found: Tensors, inner: str, stacks: Mapping[str, str]) -> Tensors:
    """Single experts ``…inner.7.w1`` as one tensor ``…inner.w1``."""
    single = re.compile(rf"(.*\.moe\.{re.escape(inner)})(\d+)\.(w\d)")
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name in list(found):
        match = single.fullmatch(name)
        if match is not None:
            experts.setdefault(match[1] + stacks[match[3]], {})[int(match[2])] = found.pop(name)
    return found | {name: torch.stack([parts[e] for e in range(len(parts))]) for name, parts in experts.items()}


def as_torchtune(saved: Tensors, config: transformers.PreTrainedConfig) -> Tensors:
    """torchtune: a tied head is not saved."""
    layer, hf = "layers.#.", "model.layers.#."
    saved = dict(saved)
    queries, keys = config.num_attention_heads * head_dim(config), groups_of(config) * head_dim(config)
    for fqn in list(saved):
        if fqn.endswith("qkv_proj.weight"):
            parts = saved.pop(fqn).split([queries, keys, keys])
            saved |= {fqn.replace("qkv_proj", f"{p}_proj"): part.clone() for p, part in zip("qkv", parts, strict=True)}
        elif fqn.endswith("gate_up_proj.weight"):
            gate, up = saved.pop(fqn).chunk(2)
            saved |= {fqn.replace("gate_up", "gate"): gate.clone(), fqn.replace("gate_up", "up"): up.clone()}
    names = {
        "model.embed_tokens.weight": "tok_embeddings.weight",
        "model.norm.weight": "norm.scale",
        "lm_head.weight": "output.weight",
        f"{hf}input_layernorm.weight": f"{layer}sa_norm.scale",
        f"{hf}post_attention_layernorm.weight": f"{layer}mlp_norm.scale",
        f"{hf}self_attn.o_proj.weight": f"{layer}attn.output_proj.weight",
        f"{hf}mlp.gate_proj.weight": f"{layer}mlp.w1.weight",
        f"{hf}mlp.down_proj.weight": f"{layer}mlp.w2.weight",
        f"{hf}mlp.up_proj.weight": f"{layer}mlp.w3.weight",
    }
    for part in "qkv":
        for suffix in ("weight", "bias"):
            names[f"{hf}self_attn.{part}_proj.{suffix}"] = f"{layer}attn.{part}_proj.{suffix}"
    found = renamed(saved, names)
    if config.model_type in ("llama", "mistral", "gemma"):
        for name in [n for n in found if re.search(r"\.[qk]_proj\.weight$", n)]:
            found[name] = side_by_side(found[name], head_dim(config))
    return found


def as_litgpt(saved: Tensors, config: transformers.PreTrainedConfig, new: bool = True) -> Tensors:
    """litgpt, or its older versions, whose fused matrices hold query groups."""
    saved = with_head(saved)
    kind, layer = config.model_type, "transformer.h.#."
    hf = "gpt_neox.layers.#." if kind == "gpt_neox" else "model.layers.#."
    sandwiched = kind in ("gemma2", "gemma3_text")
    names = {
        "model.embed_tokens.weight": "transformer.wte.weight",
        "gpt_neox.embed_in.weight": "transformer.wte.weight",
        "lm_head.weight": "lm_head.weight",
        "lm_head.bias": "lm_head.bias",
        "embed_out.weight": "lm_head.weight",
        f"{hf}self_attn.q_norm.weight": f"{layer}attn.norm_q.weight",
        f"{hf}self_attn.k_norm.weight": f"{layer}attn.norm_k.weight",
    }
    second = "pre_feedforward_layernorm" if sandwiched else "post_attention_layernorm"
    modules = {
        **{"model.norm": "transformer.ln_f", "model.final_layernorm": "transformer.ln_f"},
        **{"gpt_neox.final_layer_norm": "transformer.ln_f", f"{hf}input_layernorm": f"{layer}norm_1"},
        **{f"{hf}{second}": f"{layer}norm_2", f"{hf}post_feedforward_layernorm": f"{layer}post_mlp_norm"},
        **{f"{hf}self_attn.o_proj": f"{layer}attn.proj", f"{hf}self_attn.dense": f"{layer}attn.proj"},
        **{f"{hf}attention.dense": f"{layer}attn.proj", f"{hf}fused": f"{layer}attn.{'qkv' if new else 'attn'}"},
        **{f"{hf}mlp.fc1": f"{layer}mlp.fc", f"{hf}mlp.fc2": f"{layer}mlp.proj"},
        **{f"{hf}mlp.dense_h_to_4h": f"{layer}mlp.fc", f"{hf}mlp.dense_4h_to_h": f"{layer}mlp.proj"},
        **{f"{hf}mlp.gate": f"{layer}mlp.gate", f"{hf}block_sparse_moe.gate": f"{layer}mlp.gate"},
    }
    if sandwiched:
        modules[f"{hf}post_attention_layernorm"] = f"{layer}post_attention_norm"
    for own, theirs in (("fc_1", "gate_proj"), ("fc_2", "up_proj"), ("proj", "down_proj")):
        modules[f"{hf}mlp.{theirs}"] = f"{layer}mlp.{own}"
        modules[f"{hf}mlp.experts.%.{theirs}"] = f"{layer}mlp.experts.%.{own}"
    for own, theirs in (("fc_1", "w1"), ("fc_2", "w3"), ("proj", "w2")):
        modules[f"{hf}block_sparse_moe.experts.%.{theirs}"] = f"{layer}mlp.experts.%.{own}"
    for theirs, own in modules.items():
        names |= {f"{theirs}.{suffix}": f"{own}.{suffix}" for suffix in ("weight", "bias")}
    return renamed(_fused(saved, config, new), names)


def _fused(saved: Tensors, config: transformers.PreTrainedConfig, new: bool) -> Tensors:
    """q, k and v of each layer as one matrix ``….fused``; gate and up apart."""
    found: Tensors = {}
    head, heads, groups = head_dim(config), config.num_attention_heads, groups_of(config)
    for fqn, value in saved.items():
        joined = re.fullmatch(r"(.*\.)self_attn\.qkv_proj\.(weight|bias)", fqn)
        single = re.fullmatch(r"(.*\.)self_attn\.([qkv])_proj\.(weight|bias)", fqn)
        neox = re.fullmatch(r"(.*\.)attention\.query_key_value\.(weight|bias)", fqn)
        if joined is not None:
            q, k, v = value.split([heads * head, groups * head, groups * head])
            found[f"{joined[1]}fused.{joined[2]}"] = _in_order(q, k, v, groups, head, new)
        elif single is not None:
            q, k, v = (saved[f"{single[1]}self_attn.{p}_proj.{single[3]}"] for p in "qkv")
            found[f"{single[1]}fused.{single[3]}"] = _in_order(q, k, v, groups, head, new)
        elif neox is not None:
            q, k, v = (part.flatten(0, 1) for part in value.view(heads, 3, head, *value.shape[1:]).unbind(1))
            found[f"{neox[1]}fused.{neox[2]}"] = torch.cat([q, k, v]) if new else value
        elif fqn.endswith("gate_up_proj.weight"):
            gate, up = value.chunk(2)
            found |= {fqn.replace("gate_up", "gate"): gate.clone(), fqn.replace("gate_up", "up"): up.clone()}
        else:
            found[fqn] = value
    return found


def _in_order(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int, head: int, new: bool) -> torch.Tensor:
    if new:
        return torch.cat([q, k, v])
    each = [part.view(groups, -1, head, *part.shape[1:]) for part in (q, k, v)]
    return torch.cat(each, dim=1).flatten(0, 2)


Writer = Callable[[Tensors, transformers.PreTrainedConfig], Tensors]
CASES: dict[str, tuple[str, Writer, dict[str, Any]]] = {
    **{f"torchtitan-{k}": (k, as_torchtitan, {}) for k in ("llama", "qwen3", "qwen3_moe", "deepseek_v3")},
    **{
        f"torchtitan 0.2-{k}": (k, lambda s, c: as_torchtitan(s, c, new=False), {})
        for k in ("llama", "qwen3", "qwen3_moe", "deepseek_v3")
    },
    "torchtitan-llama-tied": ("llama", as_torchtitan, {"tie_word_embeddings": True}),
    "torchtitan-deepseek_v3-full-q": ("deepseek_v3", as_torchtitan, {"q_lora_rank": None}),
    **{f"torchtune-{k}": (k, as_torchtune, {}) for k in ("llama", "mistral", "gemma", "qwen2", "phi3")},
    "torchtune-qwen2-tied": ("qwen2", as_torchtune, {"tie_word_embeddings": True}),
    **{
        f"litgpt-{k}": (k, as_litgpt, {})
        for k in (
            *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"),
            *("gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neox"),
        )
    },
    **{
        f"older versions of litgpt-{k}": (k, lambda s, c: as_litgpt(s, c, new=False), {})
        for k in ("llama", "mistral", "mixtral", "qwen2", "gemma", "gemma2", "phi", "phi3", "gpt_neox")
    },
}
"""Name → ``model_type``, how the code base names its model, changes to the config."""
