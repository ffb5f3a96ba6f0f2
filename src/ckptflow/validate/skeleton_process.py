"""The helper process behind ``skeleton.describe_model``: asks transformers, answers in JSON on stdout."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptflow.validate.quantizer import unusable_quantizer

MEMORY_LIMIT_BYTES = 8 * 10**9
"""A config may describe a million layers; modules take memory even without values."""


def main(arguments: Sequence[str]) -> int:
    """Read tensor headers (or null) from stdin, print one line of JSON."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    tensors = json.load(sys.stdin)
    print(json.dumps(describe(Path(arguments[0]), tensors)))
    return 0


def describe(config_dir: Path, tensors: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of ``Skeleton``, or just ``unavailable`` with the reason."""
    try:
        import torch
        import transformers
    except ImportError as error:
        return {"unavailable": f"{error.name} is not installed; pip install 'ckptflow[verify]'"}
    config = json.loads((config_dir / "config.json").read_text())
    remote = "auto_map" in config
    if config.get("model_type") not in transformers.CONFIG_MAPPING:
        kind = config.get("model_type")
        why = "needs remote code, which is never run" if remote else "is not known to this transformers"
        return {"unavailable": f"model_type {kind!r} {why}"}
    try:
        parsed = transformers.AutoConfig.from_pretrained(config_dir, local_files_only=True, trust_remote_code=False)
        unusable = unusable_quantizer(parsed)
        model_class, notes = model_class_for(parsed, None if unusable else tensors)
        if isinstance(model_class, str):
            return {"unavailable": model_class}
        with torch.device("meta"):
            model = model_class(parsed)
    except Exception as error:  # noqa: BLE001 - whatever a config makes transformers raise is the answer
        return {"unavailable": f"transformers {transformers.__version__} refuses config.json: {error}", "refused": True}
    if remote:
        notes.append("config.json names remote code; the class that ships with transformers was taken instead")
    live = model.state_dict()
    saved = as_saved(model, live)
    answer = {
        "architecture": model_class.__name__,
        "shapes": {name: list(tensor.shape) for name, tensor in saved.items()},
        "live_names": list(live),
        "live_shapes": {name: list(tensor.shape) for name, tensor in live.items()} if list(saved) != list(live) else {},
        "buffers": [name for name, _ in model.named_buffers() if name in live],
        "tied": ties_of(model),
        "float32": sorted(getattr(model, "_keep_in_fp32_modules_strict", None) or ()),
        "notes": notes,
    }
    if tensors is not None and unusable is None:
        answer["loading"] = _try_loading(model_class, parsed, tensors)
    answer["not_loaded"] = unusable
    return answer


def model_class_for(config: Any, tensors: Mapping[str, Any] | None = None) -> tuple[Any, list[str]]:
    """The class to build, or the reason why there is none; and notes.

    Args:
        config: of transformers.
        tensors: name → (dtype name, shape). They choose among the classes of a config that names none, as the configs
            of models that were made from scratch do.
    """
    import transformers

    names = config.architectures or []
    if names:
        found = getattr(transformers, names[0], None)
        if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
            return f"architecture {names[0]!r} is not known to this transformers", []
        return found, []
    language, others = _unnamed_classes(config)
    fitting = [c for c in (*language, *others) if tensors is not None and _fits(_try_loading(c, config, tensors))]
    if not fitting and not language:
        return "config.json names no architecture, and the model type has no language model", []
    taken: Any = (fitting or language)[0]
    return taken, [f"config.json names no architecture; {taken.__name__} was taken"]


def _unnamed_classes(config: Any) -> tuple[list[Any], list[Any]]:
    """Classes with a language model's head, and others.

    The bare model counts only where there is no head that could be missing.
    """
    import transformers as t

    sequences = (t.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, t.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING)
    heads = (t.MODEL_FOR_CAUSAL_LM_MAPPING, t.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, t.MODEL_FOR_MASKED_LM_MAPPING)
    classifiers = (t.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, t.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING)
    both = config.is_encoder_decoder and any(type(config) in mapping for mapping in sequences)
    language = [mapping[type(config)] for mapping in (sequences if both else heads) if type(config) in mapping]
    bare = () if language else (t.MODEL_MAPPING,)
    return language, [mapping[type(config)] for mapping in (*classifiers, *bare) if type(config) in mapping]


def _fits(loading: Mapping[str, Any]) -> bool:
    return not any(loading.values())


def as_saved(model: Any, live: dict[str, Any]) -> dict[str, Any]:
    """The state dict under the names of files; transformers before 5 renames nothing that is known in advance."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return live
    saved: dict[str, Any] = revert_weight_conversion(model, dict(live))
    return saved


def ties_of(model: Any) -> dict[str, str]:
    """Alias → owner; transformers before 5 lists aliases without owners, so these come from the tied parameters."""
    declared = getattr(model, "all_tied_weights_keys", None)
    if declared is not None:
        return dict(declared)
    owners: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(id(parameter), name)
        if owner != name:
            ties[name] = owner
    return ties


def _try_loading(model_class: Any, config: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """``from_pretrained`` on tensors without values: names, renamings and shapes are all that counts."""
    import torch

    empty = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, (dtype, shape) in tensors.items()
    }
    try:
        _, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=empty,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        # transformers raises when it can't stack or split what it was given, such as 7 experts instead of 8.
        return {"missing": [], "unexpected": [], "mismatched": [], "errors": [f"{type(error).__name__}: {error}"[:500]]}
    return {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "mismatched": sorted((name, list(a), list(b)) for name, a, b in info["mismatched_keys"]),
        "errors": [str(message)[:500] for message in info["error_msgs"]],
    }
