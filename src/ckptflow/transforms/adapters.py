"""What becomes of LoRA that is in a checkpoint: folded in, written by itself, or refused until somebody chooses."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ckptflow.errors import CheckpointError, UnsupportedCheckpointError, UsageError
from ckptflow.manifest import CheckpointManifest
from ckptflow.plan import ConsolidationPlan
from ckptflow.request import ConvertRequest
from ckptflow.transforms.fqn import is_peft_name
from ckptflow.transforms.lora import export_adapter, fold_lora
from ckptflow.transforms.lora_ties import check_tied_modules

ADAPTER_CONFIG = "adapter_config.json"


def plan_adapter(
    plan: ConsolidationPlan, manifest: CheckpointManifest, request: ConvertRequest, config: Mapping[str, object]
) -> tuple[ConsolidationPlan, dict[str, bytes]]:
    """Apply ``--adapter``.

    A PEFT directory with its base model at hand is folded unless told otherwise: asking for a model leaves no doubt.
    A checkpoint that holds both is not: base model or adapter could be meant.

    Args:
        plan: all tensors under the names of the checkpoint.
        manifest: what is in the checkpoint.
        request: what was asked.
        config: the model's config.json; empty where there is none.

    Returns:
        The plan, and the files that a PEFT directory holds beside its weights; none for a model.

    Raises:
        CheckpointError: LoRA is there and nobody chose; its alpha is unknown; or it unties what the config ties.
        UsageError: an adapter was asked for where there is none.
    """
    spec = manifest.adapter
    if spec is None:
        if request.adapter is not None:
            raise UsageError("--adapter was given, but the checkpoint holds no LoRA", file=manifest.path)
        _check_unwrapped(plan, manifest)
        return plan, {}
    if request.adapter == "export":
        exported, config = export_adapter(plan, spec, request.lora_alpha)
        return exported, {ADAPTER_CONFIG: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()}
    if request.adapter is None and not spec.separate:
        raise CheckpointError(
            "the checkpoint holds LoRA beside its base weights",
            file=manifest.path,
            fix="fold it in with --adapter merge, or write it as a PEFT directory with --adapter export",
        )
    check_tied_modules(plan, spec, config)
    return fold_lora(plan, spec, request.lora_alpha), {}


def _check_unwrapped(plan: ConsolidationPlan, manifest: CheckpointManifest) -> None:
    """No model has names that only PEFT gives; written as they are, transformers would load random weights."""
    for tensor in plan.tensors:
        if is_peft_name(tensor.fqn):
            raise UnsupportedCheckpointError(
                "the names are those of a model that PEFT wrapped, in a layout where ckptflow can't unwrap it",
                file=manifest.path,
                tensor=tensor.fqn,
                fix="save the adapter with PEFT's save_pretrained, or merge it before saving",
            )
