"""Writes Megatron-LM's legacy checkpoints: tiny models, cut into ranks and stages by a naive conversion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megatron_models import (
    EXPERTS,
    H,
    Tensors,
    args_of,
    hf_model,
    megatron_layer,
    padded,
    save_rank,
    tensor_parallel_part,
)

PADDED_ROWS = 16


def write(
    tmp_path: Path,
    config: dict[str, Any],
    grid: tuple[int, int, int] = (1, 1, 1),
    stages: int = 1,
    fused: bool = False,
    experts: str = "sequential",
    **args: Any,
) -> tuple[Path, Tensors]:
    """A checkpoint of ``tp, pp, ep`` ranks and virtual stages; gives its directory and the weights that it holds."""
    tp, pp, ep = grid
    hf = hf_model(config)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(config))
    out = tmp_path / "iter_0000010"
    per_chunk = config["num_hidden_layers"] // (pp * stages)
    namespace = args_of(config, *grid, **args)
    for p in range(pp):
        for e in range(ep):
            for t in range(tp):
                chunks = []
                for stage in range(stages):
                    first = (stage * pp + p) * per_chunk
                    whole = stage_tensors(hf, config, range(first, first + per_chunk), fused)
                    part = {name: tensor_parallel_part(name, x, t, tp) for name, x in whole.items()}
                    chunks.append(local_experts(part, e, EXPERTS // ep, experts))
                named = {"model": chunks[0]} if stages == 1 else {f"model{i}": c for i, c in enumerate(chunks)}
                name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
                save_rank(out / name, named, namespace)
    return out, hf


def stage_tensors(hf: Tensors, config: dict[str, Any], layers: range, fused: bool) -> Tensors:
    """What all tensor-parallel ranks of a pipeline stage hold together."""
    found: Tensors = {}
    if layers.start == 0:
        found["embedding.word_embeddings.weight"] = padded(hf["model.embed_tokens.weight"], PADDED_ROWS)
    for local, layer in enumerate(layers):
        for name, tensor in megatron_layer(hf, layer, config, fused).items():
            found[f"decoder.layers.{local}.{name}"] = tensor
    if layers.stop == config["num_hidden_layers"]:
        found["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        head = hf.get("lm_head.weight", hf["model.embed_tokens.weight"])
        if "lm_head.weight" in hf or layers.start > 0:  # the last stage keeps a copy of a tied embedding
            found["output_layer.weight"] = padded(head, PADDED_ROWS)
    return found


def local_experts(part: Tensors, ep_rank: int, count: int, style: str) -> Tensors:
    """The rank's own experts, numbered from 0, in one of Megatron's three ways."""
    mine = range(ep_rank * count, (ep_rank + 1) * count)
    found: Tensors = {}
    grouped: dict[tuple[str, str], list[torch.Tensor]] = {}
    for name, tensor in part.items():
        prefix, mark, rest = name.partition("local_experts.")
        if not mark:
            found[name] = tensor
            continue
        number, _, linear = rest.partition(".")
        if int(number) not in mine:
            continue
        local = int(number) - mine.start
        if style == "sequential":
            found[f"{prefix}local_experts.{local}.{linear}"] = tensor
        elif style == "te":
            found[f"{prefix}{linear}{local}"] = tensor
        else:
            grouped.setdefault((prefix, linear), []).append(tensor.T)
    for (prefix, linear), tensors in grouped.items():
        stacked = torch.stack(tensors)  # GroupedMLP: [experts, in, out], kept as a flat matrix
        is_first = linear == "linear_fc1.weight"
        flat = stacked.reshape(H, -1) if is_first else stacked.reshape(-1, H)
        found[f"{prefix}{'weight1' if is_first else 'weight2'}"] = flat
    return found
