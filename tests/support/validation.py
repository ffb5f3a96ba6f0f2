"""Builds small model directories by hand, so that each way to damage one can be tried alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file

from ckptflow.validate.report import Check, ValidationReport
from ckptflow.validate.reread.base import Rereader, boxes

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


def llama_shapes(config: Mapping[str, Any] = CONFIG) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama, written down by hand."""
    h, i, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], h)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q),
            "mlp.gate_proj": (i, h),
            "mlp.up_proj": (i, h),
            "mlp.down_proj": (h, i),
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
        }.items():
            shapes[f"{at}{name}.weight"] = shape
    shapes["model.norm.weight"] = (h,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], h)
    return shapes


def llama_weights(dtype: torch.dtype = torch.bfloat16, config: Mapping[str, Any] = CONFIG) -> dict[str, torch.Tensor]:
    """Random weights; the same at each call."""
    generator = torch.Generator().manual_seed(7)
    return {n: (torch.randn(s, generator=generator) * 0.1).to(dtype) for n, s in llama_shapes(config).items()}


def write_model(
    out: Path, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = CONFIG, files: int = 1
) -> Path:
    """A model directory with config, index and ckptflow.json that agree with each other."""
    out.mkdir()
    names = list(weights)
    size = -(-len(names) // files)
    placed: dict[str, str] = {}
    for number in range(files):
        name = "model.safetensors" if files == 1 else f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        chosen = names[number * size : (number + 1) * size]
        save_file({fqn: weights[fqn].contiguous() for fqn in chosen}, out / name, metadata={"format": "pt"})
        placed |= dict.fromkeys(chosen, name)
    if config is not None:
        (out / "config.json").write_text(json.dumps(config))
    if files > 1:
        total = sum(t.nbytes for t in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (out / "model.safetensors.index.json").write_text(json.dumps(index))
    write_record(out, weights, placed)
    return out


def write_record(out: Path, weights: Mapping[str, torch.Tensor], placed: Mapping[str, str]) -> None:
    """ckptflow.json for what is in the directory now."""
    files = {
        p.name: {"bytes": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()}
        for p in sorted(out.iterdir())
        if p.name != "ckptflow.json"
    }
    tensors = {
        fqn: {
            "file": placed[fqn],
            "dtype": str(t.dtype).removeprefix("torch."),
            "shape": list(t.shape),
            "checksum": f"xxh3_128:{xxhash.xxh3_128_hexdigest(raw_bytes(t))}",
        }
        for fqn, t in weights.items()
    }
    record = {"format": 1, "recipe": {"dtype": "bfloat16"}, "files": files, "tensors": tensors, "ties": {}}
    (out / "ckptflow.json").write_text(json.dumps(record))


def check_named(report: ValidationReport, name: str) -> Check:
    """The report's check of that name."""
    return next(check for check in report.checks if check.name == name)


def read_whole(reader: Rereader, fqn: str, most_elements: int = 13) -> torch.Tensor:
    """A tensor, read in small boxes."""
    shape = reader.shape(fqn)
    assert shape is not None
    whole = torch.full(shape, float("nan"))
    for offsets, sizes in boxes(shape, most_elements):
        whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = reader.read(fqn, offsets, sizes)
    return whole


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor as they lie in a file."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def edit_json(path: Path, **changes: Any) -> None:
    """Change top-level keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def flip_bit(path: Path, offset: int) -> None:
    """Flip the lowest bit of one byte of a file; a negative offset counts from its end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
