"""Writes slices of tensors into safetensors files, as DCP's Hugging Face storage writer leaves them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "vocab_size": 12,
}
EMBEDDING = torch.arange(96.0).view(12, 8)
NORM = torch.arange(8.0)


def write_rank(path: Path, rank: int, count: int = 1, **slices: tuple[list[int], torch.Tensor]) -> Path:
    """Rank files as the writer names them; its own metadata format."""
    path.mkdir(exist_ok=True)
    named = {key.replace("__", "."): value for key, value in slices.items()}
    info = json.dumps({name: {"saved_offsets": offsets} for name, (offsets, _) in named.items()})
    save_file(
        {name: tensor.contiguous() for name, (_, tensor) in named.items()},
        path / f"shard-{rank:05d}-model-00001-of-{count:05d}.safetensors",
        metadata={"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0", "format": "pt"},
    )
    return path
