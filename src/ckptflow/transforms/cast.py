"""Which dtype each tensor gets in the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from ckptflow.dtypes import DType, dtype_named
from ckptflow.errors import UsageError
from ckptflow.plan import ConsolidationPlan, PlannedTensor
from ckptflow.transforms.quantized import quantized_module_of, quantized_modules

# Tensors that models read in fp32 whatever the model's dtype; rounding them changes what the model computes.
FP32_GLOBS: tuple[tuple[str, str], ...] = (
    ("*e_score_correction_bias", "router bias correction: rounding it routes tokens to other experts"),
    ("*expert_bias", "router bias correction: rounding it routes tokens to other experts"),
    ("*A_log", "state space decay: exponentiated, so rounding errors grow"),
    ("*.mixer.D", "state space skip connection, kept in fp32 by its kernels"),
    ("*.mamba.D", "state space skip connection, kept in fp32 by its kernels"),
    ("*.ssm.D", "state space skip connection, kept in fp32 by its kernels"),
)
CASTABLE = ("float64", "float32", "float16", "bfloat16")


def cast(plan: ConsolidationPlan, dtype: str, keep_globs: Sequence[str] = ()) -> ConsolidationPlan:
    """Give every floating point tensor ``dtype``; ``source`` leaves all as they are.

    Integer, bool and complex tensors keep theirs; float8 too, since its scale lies in another tensor, and that scale:
    the floats of quantized modules, and single numbers in a model that has such. Tensors that need fp32 and those that
    match ``keep_globs`` keep their source dtype. The reason is in the plan.

    Raises:
        UsageError: the dtype is not one to cast to, or a glob matches no tensor.
    """
    if dtype != "source" and dtype not in CASTABLE:
        raise UsageError("not a dtype to cast to", expected=f"source, {', '.join(CASTABLE)}", found=dtype)
    for glob in keep_globs:
        if not any(fnmatchcase(t.fqn, glob) for t in plan.tensors):
            raise UsageError("--keep-dtype matches no tensor", found=glob, fix="check the pattern against `inspect`")
    if dtype == "source":
        return plan
    target = dtype_named(dtype)
    quantized = quantized_modules(plan.tensors)
    return replace(plan, tensors=tuple(_cast_one(t, target, keep_globs, quantized) for t in plan.tensors))


def _cast_one(
    tensor: PlannedTensor, target: DType, keep_globs: Sequence[str], quantized: frozenset[str]
) -> PlannedTensor:
    source = tensor.source.dtype
    if source == target:
        return tensor
    reason = _reason_to_keep(tensor, keep_globs, quantized)
    if reason is not None:
        return replace(tensor, dtype=source, kept_reason=reason)
    return replace(tensor, dtype=target)


def _reason_to_keep(tensor: PlannedTensor, keep_globs: Sequence[str], quantized: frozenset[str]) -> str | None:
    fqn, source = tensor.fqn, tensor.source.dtype
    if source.kind != "float":
        return f"{source.kind} tensors keep their dtype"
    if source.name not in CASTABLE:
        return f"{source.name} is scaled by another tensor"
    for glob in keep_globs:
        if fnmatchcase(fqn, glob):
            return f"asked for by --keep-dtype {glob}"
    for glob, reason in FP32_GLOBS:
        if fnmatchcase(fqn, glob):
            return reason
    module = quantized_module_of(fqn, quantized)
    if module is not None:
        return f"{module} is quantized: rounding what scales its numbers changes all of them"
    if quantized and tensor.source.numel == 1:
        return "a single number in a quantized model: it may scale activations or the cache"
    return None
