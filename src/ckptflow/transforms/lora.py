"""LoRA: fold an adapter into its base weights, or take it out as a PEFT directory. Plan to plan; nothing is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckptflow.errors import CheckpointError, InconsistentCheckpointError, UnsupportedCheckpointError
from ckptflow.manifest import AdapterSpec, LeftOut
from ckptflow.plan import ConsolidationPlan, LoraFold, PlannedTensor
from ckptflow.transforms.fqn import PEFT_PREFIX
from ckptflow.transforms.lora_config import check_supported, known_alpha, scale_of
from ckptflow.transforms.lora_names import Part
from ckptflow.transforms.lora_parts import WrappedPlan, sort_out
from ckptflow.transforms.lora_shapes import check_layer, stored_transposed
from ckptflow.transforms.quantized import quantized_modules

SUFFIXES: dict[Part, str] = {
    "A": "lora_A.weight",
    "B": "lora_B.weight",
    "bias": "lora_B.bias",
    "embedding_A": "lora_embedding_A",
    "embedding_B": "lora_embedding_B",
    "magnitude": "lora_magnitude_vector",
}


def fold_lora(plan: ConsolidationPlan, spec: AdapterSpec, lora_alpha: float | None) -> ConsolidationPlan:
    """Fold the adapter into the base weights: a plan of the base model's names, with every adapter tensor used once.

    Args:
        plan: base and adapter tensors under the names of the checkpoint.
        spec: the adapter.
        lora_alpha: alpha, where the checkpoint doesn't tell it.

    Raises:
        CheckpointError: alpha is unknown, or the base model is not there.
        InconsistentCheckpointError: the adapter doesn't fit the base model.
        UnsupportedCheckpointError: a kind of adapter that can't be folded, by name, or a quantized base model.
    """
    check_supported(spec.config, spec.config_path)
    wrapped = sort_out(plan, spec)
    if not wrapped.base and not wrapped.originals:
        raise CheckpointError(
            "an adapter without its base model",
            file=spec.config_path,
            found=f"base_model_name_or_path: {spec.config.get('base_model_name_or_path')}",
            fix="give the base model with --base-model DIR, or write the adapter alone with --adapter export",
        )
    if not wrapped.layers and not wrapped.saved:
        raise InconsistentCheckpointError(
            "names of a model that PEFT wrapped, but no tensor of an adapter",
            found=next(iter(plan.tensors)).fqn,
            fix="name the directory that holds the adapter",
        )
    alpha = known_alpha(spec.config, lora_alpha) if wrapped.layers else 0.0
    tensors, left_out = _with_saved_modules(wrapped, spec)
    _check_not_quantized(wrapped, tensors, spec)
    transposed = stored_transposed(wrapped.layers, tensors, spec.config)
    for module, parts in wrapped.layers.items():
        _fold_layer(module, parts, tensors, spec, alpha, transposed[module])
    ties = {
        a: o
        for a, o in wrapped.ties.items()
        if a in tensors and o in tensors and tensors[a].source == tensors[o].source
    }
    ties = {a: o for a, o in ties.items() if tensors[a].fold is None and tensors[o].fold is None}
    note = f"LoRA is folded into {len(wrapped.layers)} modules" + (
        f"; {len(wrapped.saved)} tensors are the adapter's own trained copies" if wrapped.saved else ""
    )
    return replace(
        plan,
        tensors=tuple(tensor for fqn, tensor in tensors.items() if fqn not in ties),
        ties=ties,
        left_out=(*plan.left_out, *left_out),
        notes=(*plan.notes, note),
    )


def _check_not_quantized(wrapped: WrappedPlan, tensors: Mapping[str, PlannedTensor], spec: AdapterSpec) -> None:
    quantized = quantized_modules(tensors.values())
    for module in wrapped.layers:
        if module in quantized:
            raise UnsupportedCheckpointError(
                "the base weight is quantized, and can't hold its sum with the adapter",
                file=spec.config_path,
                tensor=module,
                fix="name the base model in float16, bfloat16 or float32 with --base-model, or write the adapter alone "
                "with --adapter export",
            )


def _with_saved_modules(wrapped: WrappedPlan, spec: AdapterSpec) -> tuple[dict[str, PlannedTensor], list[LeftOut]]:
    """The base model's tensors, those of modules trained as a whole replaced by the trained ones."""
    tensors = {fqn: replace(tensor, fqn=fqn) for fqn, tensor in wrapped.base.items()}
    left_out = []
    for fqn, tensor in wrapped.originals.items():
        if fqn not in wrapped.saved:
            raise InconsistentCheckpointError(
                "a module was trained as a whole, but its trained tensor is missing", tensor=tensor.fqn
            )
        left_out.append(_replaced(tensor))
    for fqn, tensor in wrapped.saved.items():
        # With ensure_weight_tying PEFT trains and saves the tied head, too, which files of the base model don't hold.
        old = tensors.get(fqn) or wrapped.originals.get(fqn)
        if old is None and not _is_listed(fqn, spec.config) and not spec.config.get("ensure_weight_tying"):
            raise InconsistentCheckpointError(
                "the adapter replaces a tensor that the base model doesn't have",
                tensor=tensor.fqn,
                expected=fqn,
                fix="check that --base-model is the model that the adapter was trained on",
            )
        if old is not None and old.shape != tensor.shape:
            raise InconsistentCheckpointError(
                "the adapter replaces a tensor by one of another shape",
                tensor=tensor.fqn,
                expected=f"shape {list(old.shape)}",
                found=f"shape {list(tensor.shape)}",
                fix="if the vocabulary was resized, give the resized base model with --base-model",
            )
        if fqn in tensors:
            left_out.append(_replaced(tensors[fqn]))
        tensors[fqn] = replace(tensor, fqn=fqn)
    return tensors, left_out


def _replaced(tensor: PlannedTensor) -> LeftOut:
    return LeftOut(
        name=tensor.source_fqns[0], reason="replaced by the adapter's trained copy", nbytes=tensor.source.nbytes
    )


def _is_listed(fqn: str, config: Mapping[str, object]) -> bool:
    """Whether modules_to_save names the module, by the end of its name as PEFT does."""
    listed = config.get("modules_to_save") or ()
    module = fqn.rpartition(".")[0]
    return isinstance(listed, Iterable) and any(module == m or module.endswith(f".{m}") for m in listed)


def _fold_layer(
    module: str,
    parts: Mapping[Part, PlannedTensor],
    tensors: dict[str, PlannedTensor],
    spec: AdapterSpec,
    alpha: float,
    transposed: bool,
) -> None:
    """Put the layer's fold on its base weight (and bias) in ``tensors``."""
    embedding = "embedding_A" in parts or "embedding_B" in parts
    names: tuple[Part, Part] = ("embedding_A", "embedding_B") if embedding else ("A", "B")
    a, b = (_needed(module, parts, name) for name in names)
    if embedding and ("A" in parts or "B" in parts or "bias" in parts):
        raise InconsistentCheckpointError("a module has LoRA as an embedding and as a layer", tensor=module)
    weight = tensors.get(f"{module}.weight")
    if weight is None:
        raise InconsistentCheckpointError(
            "the adapter adapts a module that the base model doesn't have",
            tensor=a.fqn,
            expected=f"{module}.weight",
            fix="check that --base-model is the model that the adapter was trained on",
        )
    rank = check_layer(module, a, b, parts.get("magnitude"), weight, spec, transposed or embedding)
    scale = scale_of(spec.config, module, rank, alpha)
    magnitude = parts.get("magnitude")
    if spec.config.get("use_dora") is True and magnitude is None:
        raise InconsistentCheckpointError("DoRA's magnitude vector is missing", tensor=module)
    fold = LoraFold(
        a=a.source,
        b=b.source,
        scale=scale,
        magnitude=None if magnitude is None else magnitude.source,
        transposed=transposed or embedding,
    )
    used = [name for part in parts.values() for name in part.source_fqns if part is not parts.get("bias")]
    tensors[weight.fqn] = replace(weight, fold=fold, source_fqns=(*weight.source_fqns, *used))
    if "bias" in parts:
        _fold_bias(module, parts["bias"], tensors, scale)


def _fold_bias(module: str, bias: PlannedTensor, tensors: dict[str, PlannedTensor], scale: float) -> None:
    base = tensors.get(f"{module}.bias")
    if base is None or base.shape != bias.shape:
        raise InconsistentCheckpointError(
            "the adapter's bias doesn't fit the base model's",
            tensor=bias.fqn,
            expected=f"{module}.bias of shape {list(bias.shape)}",
            found="none" if base is None else f"shape {list(base.shape)}",
        )
    fold = LoraFold(a=None, b=bias.source, scale=scale)
    tensors[base.fqn] = replace(base, fold=fold, source_fqns=(*base.source_fqns, *bias.source_fqns))


def _needed(module: str, parts: Mapping[Part, PlannedTensor], part: Part) -> PlannedTensor:
    tensor = parts.get(part)
    if tensor is None:
        raise InconsistentCheckpointError("a LoRA layer lacks a tensor", tensor=f"{module}.{SUFFIXES[part]}")
    return tensor


def export_adapter(
    plan: ConsolidationPlan, spec: AdapterSpec, lora_alpha: float | None
) -> tuple[ConsolidationPlan, dict[str, object]]:
    """The adapter alone: a plan of the tensors of ``adapter_model.safetensors``, and ``adapter_config.json``.

    Raises:
        CheckpointError: alpha is unknown: PEFT would load the adapter with its default and a wrong scale.
        UnsupportedCheckpointError: a kind of adapter that ckptflow doesn't know.
    """
    check_supported(spec.config, spec.config_path)
    wrapped = sort_out(plan, spec)
    tensors = [
        replace(_needed(module, parts, part), fqn=f"{PEFT_PREFIX}{module}.{SUFFIXES[part]}")
        for module, parts in wrapped.layers.items()
        for part in parts
    ]
    tensors += [replace(tensor, fqn=f"{PEFT_PREFIX}{fqn}") for fqn, tensor in wrapped.saved.items()]
    if not tensors:
        raise InconsistentCheckpointError("the checkpoint holds no tensors of an adapter", file=spec.config_path)
    config = {"peft_type": "LORA", "base_model_name_or_path": None, **spec.config, "inference_mode": True}
    if wrapped.layers:
        config["lora_alpha"] = known_alpha(spec.config, lora_alpha)
    reason = "base weight; only the adapter is exported"
    left_out = [
        LeftOut(name=tensor.source_fqns[0], reason=reason, nbytes=tensor.source.nbytes)
        for tensor in (*wrapped.base.values(), *wrapped.originals.values())
    ]
    unused = {entry.name for entry in left_out}
    return (
        replace(
            plan,
            tensors=tuple(tensors),
            ties={},
            equal=tuple(check for check in plan.equal if check.fqn not in unused),
            left_out=(*plan.left_out, *left_out),
        ),
        config,
    )
