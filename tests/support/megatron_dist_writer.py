"""Writes Megatron-Core's torch_dist checkpoints: tiny models, stacked by a naive conversion and saved by DCP."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from megatron_models import EXPERTS, Tensors, args_of, is_sparse, megatron_layer, padded

EXPERT_KEY = "mlp.experts.local_experts."


def dist_tensors(hf: Tensors, config: dict[str, Any], one_by_one: bool = False) -> Tensors:
    """Global tensors under Megatron's keys: layers and experts stacked where all layers have the same tensors.

    ``one_by_one`` is ``singleton_local_shards``: layers and experts in the names, gate and up apart.
    """
    layers = [megatron_layer(hf, n, config, fused=True) for n in range(config["num_hidden_layers"])]
    found = {
        "embedding.word_embeddings.weight": padded(hf["model.embed_tokens.weight"], 16),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if "lm_head.weight" in hf:
        found["output_layer.weight"] = padded(hf["lm_head.weight"], 16)
    if one_by_one:
        for n, layer in enumerate(layers):
            for name, tensor in layer.items():
                key = f"decoder.layers.{n}.{name.replace('local_experts', 'experts')}"
                if ".linear_fc1.weight" in key:
                    found[f"{key}_w"], found[f"{key}_v"] = tensor.chunk(2)
                else:
                    found[key] = tensor
        return found
    stacked = [with_stacked_experts(layer) for layer in layers]
    if len({is_sparse(config, n) for n in range(len(layers))}) > 1:
        return found | {f"decoder.layers.{n}.{k}": t for n, layer in enumerate(stacked) for k, t in layer.items()}
    return found | {f"decoder.layers.{k}": torch.stack([layer[k] for layer in stacked]) for k in stacked[0]}


def with_stacked_experts(layer: Tensors) -> Tensors:
    """One tensor of all experts in place of one of each."""
    found = {name: tensor for name, tensor in layer.items() if not name.startswith(EXPERT_KEY)}
    for name in [n for n in layer if n.startswith(f"{EXPERT_KEY}0.")]:
        rest = name.removeprefix(f"{EXPERT_KEY}0.")
        found[f"mlp.experts.experts.{rest}"] = torch.stack([layer[f"{EXPERT_KEY}{e}.{rest}"] for e in range(EXPERTS)])
    return found


def save(tensors: Tensors, out: Path, config: dict[str, Any], *, in_one: bool = False, **args: Any) -> Path:
    """As Megatron-LM does, with optimizer and extra state.

    ``in_one`` is what newer versions do: what all ranks have in common is an object among the others.
    """
    common = {"args": args_of(config, **args), "iteration": 10}
    state: dict[str, Any] = {
        **tensors,
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.ones(3),
        "decoder.layers.mlp.linear_fc1._extra_state/shard_0_4": io.BytesIO(b"x"),
        "rng_state/shard_0.0_1.1": io.BytesIO(b"x"),
    }
    if in_one:
        state["common_state/shard_0_1"] = [common]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in one process
        dcp.save(state, checkpoint_id=out, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    if not in_one:
        torch.save(common, out / "common.pt")
    (out / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (out.parent / "config").mkdir(exist_ok=True)
    (out.parent / "config" / "config.json").write_text(json.dumps(config))
    return out
