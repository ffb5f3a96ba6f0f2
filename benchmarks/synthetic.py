"""Make a synthetic FSDP checkpoint as verl leaves it: one torch file of real DTensors per rank, Llama shapes.

One process plays all ranks in turn through torch's fake process group, so that only one rank's shards are in memory.

    python benchmarks/synthetic.py OUT --gigabytes 1.2 [--ranks 4]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

VOCABULARY = 32_000
HIDDEN = 2048
INTERMEDIATE = 5632
HEADS = 32
KEY_VALUE_HEADS = 4


def llama_shapes(layers: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """FQN → global shape and sharded dim; ``o_proj`` and ``down_proj`` are cut along dim 1."""
    head = HIDDEN // HEADS
    shapes: dict[str, tuple[tuple[int, ...], int]] = {"model.embed_tokens.weight": ((VOCABULARY, HIDDEN), 0)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": ((HIDDEN, HIDDEN), 0),
            f"{prefix}self_attn.k_proj.weight": ((KEY_VALUE_HEADS * head, HIDDEN), 0),
            f"{prefix}self_attn.v_proj.weight": ((KEY_VALUE_HEADS * head, HIDDEN), 0),
            f"{prefix}self_attn.o_proj.weight": ((HIDDEN, HIDDEN), 1),
            f"{prefix}mlp.gate_proj.weight": ((INTERMEDIATE, HIDDEN), 0),
            f"{prefix}mlp.up_proj.weight": ((INTERMEDIATE, HIDDEN), 0),
            f"{prefix}mlp.down_proj.weight": ((HIDDEN, INTERMEDIATE), 1),
            f"{prefix}input_layernorm.weight": ((HIDDEN,), 0),
            f"{prefix}post_attention_layernorm.weight": ((HIDDEN,), 0),
        }
    shapes["model.norm.weight"] = ((HIDDEN,), 0)
    shapes["lm_head.weight"] = ((VOCABULARY, HIDDEN), 0)
    return shapes


def layers_for(gigabytes: float) -> int:
    """Layers that bring the fp32 model closest to that many GB (1e9 bytes)."""
    empty, one = _model_bytes(0), _model_bytes(1)
    return max(1, round((gigabytes * 1e9 - empty) / (one - empty)))


def write_fsdp_checkpoint(directory: Path, layers: int, ranks: int) -> None:
    """Write ``model_world_size_W_rank_R.pt`` for each rank, ``fsdp_config.json`` and ``huggingface/config.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
            torch.save(_rank_state(layers, rank, ranks, mesh), directory / f"model_world_size_{ranks}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    (directory / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    config = directory / "huggingface" / "config.json"
    config.parent.mkdir(exist_ok=True)
    config.write_text(json.dumps(config_of(layers), indent=2))


def _rank_state(layers: int, rank: int, ranks: int, mesh: object) -> dict[str, DTensor]:
    generator = torch.Generator().manual_seed(rank)
    pool = torch.randn(1 << 24, generator=generator) * 0.02  # drawing each value anew would take minutes at 8 GB
    state = {}
    for number, (fqn, (shape, dim)) in enumerate(llama_shapes(layers).items()):
        local_shape = list(shape)
        local_shape[dim] //= ranks
        count = torch.Size(local_shape).numel()
        local = pool[(torch.arange(count) + number * 7919) % pool.numel()] if count > pool.numel() else None
        if local is None:
            start = (number * 7919) % (pool.numel() - count + 1)
            local = pool[start : start + count].clone()
        state[fqn] = DTensor.from_local(local.view(local_shape), mesh, [Shard(dim)], run_check=False)
    return state


def _model_bytes(layers: int) -> int:
    return sum(4 * torch.Size(shape).numel() for shape, _ in llama_shapes(layers).values())


def config_of(layers: int) -> dict[str, object]:
    """config.json of a model with that many layers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    write_fsdp_checkpoint(arguments.out, layers_for(arguments.gigabytes), arguments.ranks)


if __name__ == "__main__":
    main()
