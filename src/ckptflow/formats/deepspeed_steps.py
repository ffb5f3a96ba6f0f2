"""What a DeepSpeed optimizer tells of the save that it belongs to: the ranks of one save must agree on it."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence

from ckptflow.torchfiles import LazyTensor, Stub, stub_state


def optimizer_steps(optimizer: object) -> tuple[float, ...]:
    """``step`` of each entry of the optimizer's state, and of its param groups, where it is a number."""
    state = optimizer.get("state") if isinstance(optimizer, Mapping) else None
    entries = list(state.values()) if isinstance(state, Mapping) else []
    return _numbers([*entries, *_groups(optimizer)], "step")


def common_facts(state: Mapping[str, object], optimizer: object) -> dict[str, object]:
    """What is one and the same for all ranks, by its name in messages; None where the file doesn't tell.

    Args:
        state: DeepSpeed's ``optimizer_state_dict``.
        optimizer: the state of the optimizer that it wraps.
    """
    stage = state.get("zero_stage")  # a number, or ZeroStageEnum(number)
    return {
        "zero_stage": next(iter(stage.args), None) if isinstance(stage, Stub) else stage,
        "ds_version": state.get("ds_version"),
        "the loss scale": _number(stub_state(state.get("loss_scaler")).get("cur_scale")),
        "the learning rates": _numbers(_groups(optimizer), "lr") or None,
    }


def _groups(optimizer: object) -> list[object]:
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    return list(groups) if isinstance(groups, (list, tuple)) else []


def _numbers(entries: Sequence[object], key: str) -> tuple[float, ...]:
    found = (_number(entry[key]) for entry in entries if isinstance(entry, Mapping) and key in entry)
    return tuple(number for number in found if number is not None)


def _number(value: object) -> float | None:
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, LazyTensor) or value.numel != 1:
        return None
    code = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}.get(value.dtype_name)
    if code is None:
        return None
    with open(value.storage.path, "rb") as file:
        data = os.pread(file.fileno(), struct.calcsize(code), value.byte_offset)
    return float(struct.unpack(code, data)[0]) if len(data) == struct.calcsize(code) else None
