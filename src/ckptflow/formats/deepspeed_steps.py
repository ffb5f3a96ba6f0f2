"""How many steps a DeepSpeed optimizer has done, as far as its state tells: ranks of one save must agree."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping

from ckptflow.torchfiles import LazyTensor


def optimizer_steps(optimizer: object) -> tuple[float, ...]:
    """``step`` of each entry of the optimizer's state, and of its param groups, where it is a number."""
    if not isinstance(optimizer, Mapping):
        return ()
    state, groups = optimizer.get("state"), optimizer.get("param_groups")
    entries = list(state.values()) if isinstance(state, Mapping) else []
    entries += list(groups) if isinstance(groups, (list, tuple)) else []
    steps = (_number(entry["step"]) for entry in entries if isinstance(entry, Mapping) and "step" in entry)
    return tuple(step for step in steps if step is not None)


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
