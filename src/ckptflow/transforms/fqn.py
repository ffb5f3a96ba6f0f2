"""Names of tensors: what wrappers around the model put into them, and what of it belongs to the model."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckptflow.errors import InconsistentCheckpointError, UnsupportedCheckpointError

# Parts that wrapper modules insert anywhere in a name: FSDP1, torch.compile, activation checkpointing.
WRAPPER_PARTS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
_WRAPPER = re.compile("|".join(WRAPPER_PARTS))
# DistributedDataParallel and DataParallel put this in front of all names; elsewhere it may be the model's own.
DDP_PREFIX = "module."
# trl's AutoModelForCausalLMWithValueHead: the model is pretrained_model, the head beside it v_head.
TRL_PREFIX = "pretrained_model."
TRL_HEAD = "v_head."
# FSDP1's own flat parameters: LOCAL_STATE_DICT, whose shapes only the live model knows.
FLAT_PARAMETER = re.compile(r"(?:^|\.)_?flat_param(?:_\d+)?$")

PEFT_PREFIX = "base_model.model."
PEFT_PARTS = re.compile(
    r"\.(?:base_layer|original_module|modules_to_save|lora_A|lora_B|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector)(?:\.|$)"
)


def model_names(names: Iterable[str]) -> dict[str, str]:
    """Name in the file → name in the model, in order.

    Raises:
        InconsistentCheckpointError: two names become one.
        UnsupportedCheckpointError: flat parameters, which have no names of their own.
    """
    kept = {name: _without_wrapper_parts(name) for name in names}
    if kept and all(short.startswith(DDP_PREFIX) for short in kept.values()):
        kept = {name: short.removeprefix(DDP_PREFIX) for name, short in kept.items()}
    if _is_trl(kept.values()):
        kept = {name: short.removeprefix(TRL_PREFIX) for name, short in kept.items()}
    taken: dict[str, str] = {}
    for name, short in kept.items():
        if "flat_param" in short and FLAT_PARAMETER.search(short):
            raise UnsupportedCheckpointError(
                "flat parameters of FSDP1 (LOCAL_STATE_DICT), whose shapes the file doesn't hold",
                tensor=name,
                fix="save with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT",
            )
        other = taken.setdefault(short, name)
        if other != name:
            raise InconsistentCheckpointError(
                "two tensors have one name once wrapper prefixes are removed", tensor=short, found=f"{other} and {name}"
            )
    return kept


def _without_wrapper_parts(name: str) -> str:
    if _WRAPPER.search(name) is None:
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS)


def _is_trl(names: Iterable[str]) -> bool:
    return {name.partition(".")[0] for name in names} == {TRL_PREFIX[:-1], TRL_HEAD[:-1]}


def is_peft_name(name: str) -> bool:
    """Whether a name can only come from a model that PEFT wrapped."""
    return name.startswith(PEFT_PREFIX) or PEFT_PARTS.search(name) is not None
