"""One small checkpoint of every layout, written by the real writers: what the fuzzers damage."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import Shard

import deepspeed_parallel_writer
import deepspeed_writer
import megatron_dist_writer
import megatron_legacy_writer
import mxnet_writer
from dcp_hf_writer import CONFIG, EMBEDDING, NORM, write_rank
from megatron_models import config_of, hf_model
from peft_models import save_apart, trained
from rank_writer import mesh_of, save_ranks, sharded

SHAPES = {
    "embed.weight": (6, 4),
    "layers.0.q.weight": (5, 3),
    "layers.0.q.bias": (5,),
    "norm.weight": (3,),
}


@dataclass(frozen=True, slots=True)
class Seed:
    """A checkpoint inside a directory.

    Attributes:
        path: what is given to ``convert``, relative to the directory.
        options: more fields of the request; paths among them are relative too.
    """

    path: str = "."
    options: Mapping[str, Any] = field(default_factory=dict)


def weights(seed: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def fsdp(root: Path) -> Seed:
    full = weights()
    step = root / "global_step_10" / "actor"
    save_ranks(step, 2, lambda rank: {n: sharded(t, mesh_of([2]), [Shard(0)]) for n, t in full.items()})
    (step / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 2}))
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return Seed("global_step_10")


def fsdp_sharded_tensor(root: Path) -> Seed:
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharding_spec import ShardMetadata

    full = weights()["embed.weight"]

    def state(rank: int) -> dict[str, Any]:
        regions = [ShardMetadata([3 * r, 0], [3, 4], placement=f"rank:{r}/cpu") for r in range(2)]
        metadata = ShardedTensorMetadata(regions, full.size(), TensorProperties(dtype=full.dtype))
        local = LocalShard(full[3 * rank : 3 * rank + 3].clone(), regions[rank])
        whole = ShardedTensor._init_from_local_shards_and_global_metadata([local], metadata)
        return {"w": whole, "plain": torch.tensor([5.0])}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that ShardedTensor will go
        save_ranks(root, 2, state)
    return Seed()


def fsdp_plain(root: Path) -> Seed:
    save_ranks(root, 1, lambda _: weights())
    return Seed()


def hf_safetensors(root: Path) -> Seed:
    named = weights()
    placed = {}
    for number, (name, tensor) in enumerate(named.items(), start=1):
        file = f"model-{number:05d}-of-{len(named):05d}.safetensors"
        save_file({name: tensor}, root / file, metadata={"format": "pt"})
        placed[name] = file
    (root / "config.json").write_text(json.dumps({"model_type": "other", "dtype": "float32"}))
    total = sum(t.nbytes for t in named.values())
    content = {"metadata": {"total_size": total}, "weight_map": placed}
    (root / "model.safetensors.index.json").write_text(json.dumps(content))
    return Seed()


def hf_bin(root: Path) -> Seed:
    torch.save(weights(), root / "pytorch_model.bin")
    (root / "config.json").write_text(json.dumps({"model_type": "other"}))
    return Seed()


def hf_legacy_bin(root: Path) -> Seed:
    torch.save(weights(), root / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return Seed()


def peft(root: Path) -> Seed:
    save_apart(trained(), root)
    return Seed("adapter", {"base_model": "base", "adapter": "merge"})


def torch_dcp(root: Path) -> Seed:
    named = weights()
    state = {"model": named, "optim": {"state": {n: {"exp_avg": torch.ones_like(t)} for n, t in named.items()}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in one process
        dcp.save(state, storage_writer=FileSystemWriter(root / "step-10", thread_count=2), no_dist=True)
    return Seed("step-10")


def dcp_hf(root: Path) -> Seed:
    w, b = EMBEDDING, NORM
    write_rank(root, 1, model__embed_tokens__weight=([0, 0], w[:6]), model__norm__weight=([0], b))
    write_rank(root, 2, model__embed_tokens__weight=([6, 0], w[6:]))
    config = root.parent / "config"
    config.mkdir(exist_ok=True)
    (config / "config.json").write_text(json.dumps(CONFIG))
    return Seed(".", {"config_dir": config})


def megatron_dist_checkpoint(root: Path) -> Seed:
    config = config_of("llama", layers=2)
    megatron_dist_writer.save(
        megatron_dist_writer.dist_tensors(hf_model(config), config), root / "iter_0000010", config
    )
    return Seed("iter_0000010", {"config_dir": "config"})


def megatron_legacy_checkpoint(root: Path) -> Seed:
    megatron_legacy_writer.write(root, config_of("llama", layers=2), (2, 2, 1))
    return Seed("iter_0000010", {"config_dir": "config"})


def zero_2(root: Path) -> Seed:
    named = list(weights().items())
    deepspeed_writer.write_zero2(root, [dict(named[:2]), dict(named[2:])], 2)
    return Seed()


def zero_3(root: Path) -> Seed:
    named = list(weights().items())
    deepspeed_writer.write_zero3(root, [dict(named[:2]), dict(named[2:])], 2, subgroup=11)
    return Seed()


def zero_0(root: Path) -> Seed:
    deepspeed_writer.model_states(root / "t" / "mp_rank_00_model_states.pt", weights(), None, world=1, stage=0)
    (root / "latest").write_text("t")
    return Seed()


def pipeline(root: Path) -> Seed:
    deepspeed_parallel_writer.write_pipeline(root, zero=True)
    return Seed()


def universal(root: Path) -> Seed:
    deepspeed_parallel_writer.write_universal(root, weights(), flat=False)
    return Seed()


def lightning(root: Path) -> Seed:
    state = {"state_dict": {**weights(), "other.scale": torch.ones(2)}, "pytorch-lightning_version": "2.6.6"}
    torch.save({**state, "global_step": 4, "optimizer_states": [torch.ones(50)]}, root / "last.ckpt")
    return Seed("last.ckpt")


def full_state_dict(root: Path) -> Seed:
    state = weights()
    state["view.weight"] = state["embed.weight"][1:3, 1:3]
    torch.save({"model": state, "optimizer": {"state": {0: torch.ones(50)}}}, root / "pytorch_model_fsdp.bin")
    return Seed()


def mxnet_params(root: Path) -> Seed:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    rows = mxnet_writer.sparse(1, (5, 4), array, np.array([0, 2, 4]))
    arrays = {"arg:w": mxnet_writer.dense(array), "aux:m": mxnet_writer.legacy(array[0] + 1), "arg:rows": rows}
    mxnet_writer.array_list(root / "net-0003.params", arrays)
    (root / "net-symbol.json").write_text(json.dumps({"nodes": [], "arg_nodes": [], "heads": []}))
    return Seed("net-0003.params")


SEEDS: dict[str, Callable[[Path], Seed]] = {
    function.__name__: function
    for function in (
        fsdp,
        fsdp_sharded_tensor,
        fsdp_plain,
        hf_safetensors,
        hf_bin,
        hf_legacy_bin,
        peft,
        torch_dcp,
        dcp_hf,
        megatron_dist_checkpoint,
        megatron_legacy_checkpoint,
        zero_0,
        zero_2,
        zero_3,
        pipeline,
        universal,
        lightning,
        full_state_dict,
        mxnet_params,
    )
}


def by_torch(pattern: str, *keys: str) -> Callable[[Path], Mapping[str, Tensor]]:
    """Reads the torch file of that name with torch, and goes down the keys."""

    def read(root: Path) -> Mapping[str, Tensor]:
        (path,) = root.rglob(pattern)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch finds the damage odd
            value = torch.load(path, weights_only=True)
        for key in keys:
            value = value[key]
        return dict(value)

    return read


def by_safetensors(root: Path) -> Mapping[str, Tensor]:
    return {name: t for path in root.rglob("*.safetensors") for name, t in load_file(path).items()}


# Kinds of damage that nothing in the files can show, so that a reader can't be blamed for other values.
# A header or pickle that was rewritten by hand with its checksum made good is another checkpoint, not a damaged one.
REWRITTEN = frozenset({"pickle_edit", "pickle_number", "json_edit"})
# Headers without a checksum: a flipped byte in a name or a shape that fits reads as another name or shape.
UNPROTECTED_HEADERS = frozenset({"hf_safetensors", "hf_legacy_bin", "peft", "dcp_hf", "torch_dcp", "mxnet_params"})
# Values without a checksum: a flipped byte of a tensor is another value.
UNPROTECTED_VALUES = frozenset({"hf_safetensors", "hf_legacy_bin", "peft", "dcp_hf", "mxnet_params"})
# Ranks' files that hold no rank, and data files of equal layout: swapped ones look like those that were saved.
NAMELESS_FILES = frozenset({"torch_dcp", "megatron_legacy_checkpoint"})

# Layouts that say everything once: nothing can show that a name or a shape in them was changed by hand.
OPINIONS: dict[str, Callable[[Path], Mapping[str, Tensor]]] = {
    "fsdp_plain": by_torch("*_rank_0.pt"),
    "hf_bin": by_torch("*.bin"),
    "hf_legacy_bin": by_torch("*.bin"),
    "hf_safetensors": by_safetensors,
    "zero_0": by_torch("*model_states.pt", "module"),
    "lightning": by_torch("*.ckpt", "state_dict"),
    "full_state_dict": by_torch("*.bin", "model"),
}
