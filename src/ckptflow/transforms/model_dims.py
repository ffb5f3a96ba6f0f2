"""The sizes that a config.json gives a model, under the names that the tables of tensors use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptflow.errors import CorruptFileError

Config = Mapping[str, Any]
Condition = Callable[[Config], bool]

# More layers, experts or rows than any model has: a config that claims them would make tables of absurd size.
MAX_DIM = 10**7
MAX_LAYERS = 10**4


def named_dims(config: Config) -> dict[str, int]:
    """Sizes in elements, such as ``hidden``, ``qkv`` and ``2*ffn``; only those that the config tells.

    Raises:
        CorruptFileError: a size that each model has is missing or no count.
    """
    hidden, heads, layers = (_count(config, key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    kv_heads = _count(config, "num_key_value_heads", heads)
    head = _count(config, "head_dim", hidden // heads)
    dims = {
        "one": 1,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "layers": min(layers, MAX_LAYERS),
        "vocab": _count(config, "vocab_size"),
        "labels": len(config["id2label"])
        if isinstance(config.get("id2label"), Mapping)
        else config.get("num_labels", 1),
        "head": head,
        "q": heads * head,
        "kv": kv_heads * head,
        "qkv": (heads + 2 * kv_heads) * head,
        "attention": heads * head,
        "ffn": _count(config, "intermediate_size"),
    }
    if heads % kv_heads:
        raise CorruptFileError(
            "heads don't divide into query groups", expected=f"a multiple of {kv_heads}", found=heads
        )
    dims |= _moe_dims(config, dims["ffn"])
    if config.get("kv_lora_rank") is not None:
        dims |= _mla_dims(config, heads)
    return dims | {f"2*{name}": 2 * dims[name] for name in ("ffn", "expert_ffn", "shared_ffn") if name in dims}


def _moe_dims(config: Mapping[str, Any], ffn: int) -> dict[str, int]:
    for key in ("n_routed_experts", "num_local_experts", "num_experts"):
        if config.get(key):
            break
    else:
        return {"experts": 0}
    expert_ffn = _count(config, "moe_intermediate_size", ffn)
    shared = config.get("n_shared_experts")
    shared_ffn = expert_ffn * _count(config, "n_shared_experts") if shared else expert_ffn
    return {
        "experts": _count(config, key),
        "expert_ffn": expert_ffn,
        "shared_ffn": _count(config, "shared_expert_intermediate_size", shared_ffn),
    }


def _mla_dims(config: Mapping[str, Any], heads: int) -> dict[str, int]:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""
    nope, rope, value, rank = (
        _count(config, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    return {
        "q_rank": _count(config, "q_lora_rank", 1),
        "q_up": heads * (nope + rope),
        "kv_down": rank + rope,
        "kv_rank": rank,
        "kv_up": heads * (nope + value),
        "attention": heads * value,
    }


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or not 0 < value <= MAX_DIM:
        raise CorruptFileError("config.json lacks a size, or it is no count", expected=key, found=value)
    return value
