"""Which layers of a model are mixtures of experts, told by config.json as transformers tells it."""

from __future__ import annotations

from ckptflow.transforms.model_dims import Config


def none_sparse(config: Config, layer: int) -> bool:
    """Models without experts."""
    return False


def all_sparse(config: Config, layer: int) -> bool:
    """Mixtral."""
    return True


def qwen_sparse(config: Config, layer: int) -> bool:
    """Qwen2MoeDecoderLayer, Qwen3MoeDecoderLayer."""
    step = int(config.get("decoder_sparse_step") or 1)
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % step == 0


def deepseek_sparse(config: Config, layer: int) -> bool:
    """DeepseekV2DecoderLayer, DeepseekV3DecoderLayer, Glm4MoeDecoderLayer."""
    frequency = int(config.get("moe_layer_freq") or 1)
    return layer >= int(config.get("first_k_dense_replace") or 0) and layer % frequency == 0
