"""Writes DeepSpeed's files with torch.save, in the structures of DeepSpeed 0.19, without DeepSpeed.

The classes that its optimizer files refer to are stand-ins under the same module names.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

ZERO_MODULES = {
    "deepspeed": (),
    "deepspeed.runtime": (),
    "deepspeed.runtime.fp16": (),
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler",),
    "deepspeed.runtime.zero": (),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils": (),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}


# Entries of a group under this name are padding between parameters.
HOLE = "hole"


@contextmanager
def stand_ins() -> Iterator[dict[str, Any]]:
    """Importable stand-ins for DeepSpeed's classes while files are written."""
    classes: dict[str, Any] = {}
    for name, members in ZERO_MODULES.items():
        module = ModuleType(name)
        for member in members:
            base = int if member == "ZeroStageEnum" else object
            classes[member] = type(member, (base,), {"__module__": name})
            setattr(module, member, classes[member])
        sys.modules[name] = module
    try:
        yield classes
    finally:
        for name in ZERO_MODULES:
            del sys.modules[name]


def parameters(shapes: Mapping[str, Sequence[int]], seed: int = 0) -> dict[str, Tensor]:
    """fp32 masters."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tuple(shape), generator=generator) for name, shape in shapes.items()}


def model_states(
    path: Path,
    module: Mapping[str, Tensor] | None,
    groups: Sequence[Mapping[str, Tensor]] | None,
    *,
    world: int,
    stage: int,
    **more: object,
) -> None:
    """One ``*_model_states.pt``."""
    state: dict[str, object] = {
        "module": None if module is None else OrderedDict(module),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": None if groups is None else [OrderedDict((n, t.shape) for n, t in g.items()) for g in groups],
        "frozen_param_shapes": OrderedDict(),
        "shared_params": {},
        "frozen_param_fragments": OrderedDict(),
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": 7,
        "dp_world_size": world,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": stage}},
        "ds_version": "0.19.8",
        "tokens_seen": 99,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({**state, **more}, path)


def partitions(group: Mapping[str, Tensor], world: int) -> tuple[list[Tensor], int]:
    """ZeRO 1, 2: the padded slices of one group, and the elements that are not padding."""
    flat = torch.cat([t.reshape(-1) for t in group.values()] or [torch.zeros(0)])
    padded = -(-flat.numel() // (2 * world)) * 2 * world
    vector = torch.cat([flat, torch.full((padded - flat.numel(),), 1e9)])
    return list(vector.chunk(world)) if padded else [vector] * world, flat.numel()


def optim_states(
    path: Path,
    rank: int,
    groups: Sequence[Mapping[str, Tensor]],
    *,
    world: int,
    stage: int = 2,
    lean: bool = True,
    recorded: bool = True,
    recorded_as: Sequence[Mapping[str, Tensor]] | None = None,
    step: int = 7,
    lr: float = 0.1,
    counts: Sequence[int] | None = None,
    cut: int = 0,
    **more: object,
) -> None:
    """One optimizer file of ZeRO 1 or 2; its moments are NaN, so that nobody can take them for weights.

    ``recorded_as``: the groups in the order in which the fragments are recorded, where it isn't the vectors'.
    """
    counts = counts or [world] * len(groups)
    masters, paddings, mappings = [], [], []
    with stand_ins() as classes:
        for group, seen, share in zip(groups, recorded_as or groups, counts, strict=True):
            slices, used = partitions(group, share)
            mine = slices[rank // (world // share)]
            size = mine.numel()
            begin = (rank // (world // share)) * size
            padding = min(max(begin + size - used, 0), size)
            masters.append((mine[: size - padding] if lean else mine)[: size - cut].clone())
            paddings.append(padding if lean else 0)
            mappings.append(_mapping(seen, begin, size, classes["fragment_address"]))
        state: dict[str, object] = {
            "loss_scaler": classes["LossScaler"](),
            "base_optimizer_state": {
                "state": {
                    g: {"step": torch.tensor(float(step)), "exp_avg": torch.full((m.numel(),), torch.nan)}
                    for g, m in enumerate(masters)
                },
                "param_groups": [{"lr": lr, "params": [g]} for g in range(len(masters))],
            },
            "single_partition_of_fp32_groups": masters,
            "zero_stage": classes["ZeroStageEnum"](stage),
            "partition_count": list(counts),
            "ds_version": "0.19.8",
        }
        if lean:
            state["group_paddings"] = paddings
        if recorded:
            state["param_slice_mappings"] = mappings
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"optimizer_state_dict": {**state, **more}, "ds_version": "0.19.8"}, path)


def _mapping(group: Mapping[str, Tensor], begin: int, size: int, address: type[Any]) -> OrderedDict[str, object]:
    mapping: OrderedDict[str, object] = OrderedDict()
    at = 0
    for name, tensor in group.items():
        start, stop = max(at, begin), min(at + tensor.numel(), begin + size)
        if stop > start and not name.startswith(HOLE):
            mapping[name] = address()
            mapping[name].__dict__.update(numel=stop - start, start=start - begin)
        at += tensor.numel()
    return mapping


def write_zero2(
    save: Path,
    groups: Sequence[Mapping[str, Tensor]],
    world: int,
    *,
    tag: str = "global_step7",
    dtype: torch.dtype = torch.bfloat16,
    prefix: str = "bf16_",
    stage: int = 2,
    mp: int = 0,
    module: Mapping[str, Tensor] | None = None,
    model: Mapping[str, object] | None = None,
    latest: bool = True,
    **optim: Any,
) -> Path:
    """A whole folder of ZeRO 1 or 2; returns the tag folder."""
    folder = save / tag
    copies = {n: t.to(dtype) for g in groups for n, t in g.items()} if module is None else module
    model_states(
        folder / f"mp_rank_{mp:02d}_model_states.pt", copies, groups, world=world, stage=stage, **(model or {})
    )
    for rank in range(world):
        name = f"{prefix}zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"
        optim_states(folder / name, rank, groups, world=world, stage=stage, **optim)
    if latest:
        (save / "latest").write_text(tag)
    return folder


def shards(tensor: Tensor, world: int) -> list[Tensor]:
    """ZeRO 3: one parameter cut over the ranks, padded."""
    share = -(-tensor.numel() // world)
    padding = torch.full((share * world - tensor.numel(),), 1e9).to(tensor.dtype)
    vector = torch.cat([tensor.reshape(-1), padding])
    return list(vector.split(share)) if share else [vector] * world


def write_zero3(
    save: Path,
    groups: Sequence[Mapping[str, Tensor]],
    world: int,
    *,
    frozen: Mapping[str, Tensor] | None = None,
    subgroup: int = 10**9,
    mp: int = 0,
    module: Mapping[str, Tensor] | None = None,
    **model: Any,
) -> Path:
    """A whole folder of ZeRO 3; flat groups are cut after ``subgroup`` elements."""
    folder = save / "global_step7"
    frozen = frozen or {}
    names = [*frozen, *(n for g in groups for n in g)]
    empty = {name: torch.empty(0, dtype=torch.bfloat16) for name in names}
    for rank in range(world):
        model_states(
            folder / f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_model_states.pt",
            {**empty, **(module or {})},
            groups,
            world=world,
            stage=3,
            **{
                "frozen_param_shapes": OrderedDict((n, t.shape) for n, t in frozen.items()),
                "frozen_param_fragments": OrderedDict((n, shards(t, world)[rank]) for n, t in frozen.items()),
                **model,
            },
        )
        flat = torch.cat([shards(t, world)[rank] for g in groups for t in g.values()])
        with stand_ins() as classes:
            state = {
                "zero_stage": classes["ZeroStageEnum"](3),
                "loss_scaler": classes["LossScaler"](),
                "partition_count": world,
                "optimizer_state_dict": {"state": {0: {"step": 7, "exp_avg": torch.full_like(flat, torch.nan)}}},
                "fp32_flat_groups": [part.clone() for part in flat.split(subgroup)],
            }
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": state}, folder / name)
    (save / "latest").write_text(folder.name)
    return folder


ODD = {"embed.weight": (7, 3), "layer.weight": (5, 2, 3), "layer.bias": (5,), "scale": (), "norm.weight": (13,)}


def two_groups() -> list[dict[str, Tensor]]:
    """Parameters of odd sizes in the two groups of weight decay."""
    values = parameters(ODD)
    decay = {name: values[name] for name in ("layer.weight", "embed.weight")}
    return [decay, {name: t for name, t in values.items() if name not in decay}]


def merged(groups: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The parameters of all groups."""
    return {name: tensor for group in groups for name, tensor in group.items()}
