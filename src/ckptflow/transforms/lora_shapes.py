"""Whether LoRA matrices fit their base weights, and which way round these are stored."""

from __future__ import annotations

from collections.abc import Mapping

from ckptflow.errors import InconsistentCheckpointError
from ckptflow.manifest import AdapterSpec
from ckptflow.plan import PlannedTensor
from ckptflow.tensors import Shape, TensorSource
from ckptflow.transforms.lora_config import expected_rank
from ckptflow.transforms.lora_names import Part


def stored_transposed(
    layers: Mapping[str, Mapping[Part, PlannedTensor]],
    tensors: Mapping[str, PlannedTensor],
    config: Mapping[str, object],
) -> dict[str, bool]:
    """Whether each base weight is stored [in, out], as GPT-2's Conv1D does.

    The config has one flag for all modules; where a weight isn't square its shape tells, and outranks the flag.

    Raises:
        InconsistentCheckpointError: flag and shapes differ, and a square weight could be either.
    """
    by_shape: dict[str, bool | None] = {}
    for module, parts in layers.items():
        base = tensors.get(f"{module}.weight")
        by_shape[module] = _orientation(parts, base.shape if base is not None else None)
    seen = {value for value in by_shape.values() if value is not None}
    flag = config.get("fan_in_fan_out")
    declared = flag if isinstance(flag, bool) else (seen == {True})
    undecided = [module for module, value in by_shape.items() if value is None]
    if undecided and seen and seen != {declared}:
        raise InconsistentCheckpointError(
            "base weights are stored [in, out] and [out, in], and a square one does not tell which it is",
            tensor=f"{undecided[0]}.weight",
            found=f"fan_in_fan_out: {flag}",
            fix="merge it with PEFT (merge_and_unload) and save the result",
        )
    return {module: declared if value is None else value for module, value in by_shape.items()}


def _orientation(parts: Mapping[Part, PlannedTensor], base: Shape | None) -> bool | None:
    """True: [in, out]; False: [out, in] or no matrix; None: square, or no telling."""
    if "A" not in parts or "B" not in parts or base is None or len(base) != 2:
        return False
    into, out = parts["A"].shape[-1], parts["B"].shape[0]
    if into == out:
        return None
    return base == (into, out)


def check_layer(
    module: str,
    a: PlannedTensor,
    b: PlannedTensor,
    magnitude: PlannedTensor | None,
    weight: PlannedTensor,
    spec: AdapterSpec,
    transposed: bool,
) -> int:
    """The layer's rank, once all its shapes fit the base weight.

    Raises:
        InconsistentCheckpointError: they don't, or the config gives another rank.
    """
    rank = a.shape[0] if a.shape else 0
    update = _update_shape(a.source, b.source, transposed)
    if update is None or update != weight.shape:
        raise InconsistentCheckpointError(
            "LoRA matrices don't fit their base weight",
            tensor=a.fqn,
            expected=f"an update of shape {list(weight.shape)} for {weight.fqn}",
            found=f"A {list(a.shape)}, B {list(b.shape)}",
            fix="the adapter belongs to another base model",
        )
    declared = expected_rank(spec.config, module)
    if declared is not None and declared != rank:
        raise InconsistentCheckpointError(
            "the adapter's config gives another rank than its tensors have",
            file=spec.config_path,
            tensor=a.fqn,
            expected=f"r {declared}",
            found=f"r {rank}",
        )
    outputs = weight.shape[1] if transposed else weight.shape[0]
    if magnitude is not None and magnitude.source.numel != outputs:
        raise InconsistentCheckpointError(
            "DoRA's magnitude vector doesn't fit its base weight",
            tensor=magnitude.fqn,
            expected=f"{outputs} elements",
            found=f"shape {list(magnitude.shape)}",
        )
    return rank


def _update_shape(a: TensorSource, b: TensorSource, transposed: bool) -> Shape | None:
    """Shape of the update that A and B make; None where they don't fit each other."""
    if len(a.shape) < 2 or len(a.shape) != len(b.shape) or b.shape[1] != a.shape[0] or any(n != 1 for n in b.shape[2:]):
        return None
    if transposed:
        return (a.shape[1], b.shape[0]) if len(a.shape) == 2 else None
    return (b.shape[0], *a.shape[1:])
