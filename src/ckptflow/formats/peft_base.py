"""The base model of an adapter that was saved by itself: found, read and put beside the adapter's tensors."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ckptflow.errors import InconsistentCheckpointError, NotACheckpointError, UnsupportedCheckpointError
from ckptflow.formats.base import ReadOptions
from ckptflow.formats.files import list_names
from ckptflow.formats.huggingface import HuggingFaceDirectory
from ckptflow.formats.weight_sets import weight_sets
from ckptflow.manifest import AdapterSpec, CheckpointManifest
from ckptflow.transforms.fqn import PEFT_PREFIX
from ckptflow.transforms.lora_config import check_base_unchanged
from ckptflow.transforms.lora_names import Base, LoraPart, role_of

_FILES = HuggingFaceDirectory()


def with_base_model(manifest: CheckpointManifest, options: ReadOptions) -> CheckpointManifest:
    """Treat an adapter that a trainer saved without the frozen weights as PEFT's own directories are treated.

    The Trainer has DeepSpeed leave out what is frozen (``exclude_frozen_parameters``), Accelerate gathers an adapter
    alone: in any layout the names are then those of a wrapped model, and its base model is somewhere else.

    Raises:
        CheckpointError: the base model is refused.
    """
    spec = manifest.adapter
    if spec is None or spec.separate or spec.prefix != PEFT_PREFIX or not _lacks_base(manifest, spec.prefix):
        return manifest
    spec = replace(spec, separate=True)
    return join_base(replace(manifest, adapter=spec), spec, options)


def _lacks_base(manifest: CheckpointManifest, prefix: str) -> bool:
    """Whether LoRA is there, and no weight that it adapts."""
    try:
        roles = [role_of(name, prefix, separate=False) for name in (*manifest.tensors, *manifest.ties)]
    except UnsupportedCheckpointError:  # it can't be folded anyway, and says so when that is asked for
        return False
    adapted = {f"{role.module}.weight" for role in roles if isinstance(role, LoraPart)}
    return bool(adapted) and not any(isinstance(role, Base) and role.fqn in adapted for role in roles)


def join_base(alone: CheckpointManifest, spec: AdapterSpec, options: ReadOptions) -> CheckpointManifest:
    """The adapter with its base model; the adapter as it is where no base model is at hand.

    Raises:
        CheckpointError: the base model is refused, or is not what the adapter was trained on.
    """
    base_dir = _base_directory(spec, options)
    if base_dir is None:
        return alone
    check_base_unchanged(spec.config, spec.config_path)
    base = _read_base(base_dir)
    both = set(alone.tensors) & set(base.tensors)
    if both:
        raise InconsistentCheckpointError(
            "adapter and base model have a tensor of one name", file=base.path, tensor=min(both)
        )
    return replace(
        alone,
        tensors={**base.tensors, **alone.tensors},
        ties={**base.ties, **alone.ties},
        equal=(*base.equal, *alone.equal),
        left_out=(*base.left_out, *alone.left_out),
        files=(*base.files, *alone.files),
        storage_bytes=base.storage_bytes + alone.storage_bytes,
        wasted_bytes=base.wasted_bytes + alone.wasted_bytes,
        config_dir=options.config_dir or base.config_dir,
        notes=(*base.notes, *alone.notes, f"base model: {base.path}"),
    )


def _base_directory(spec: AdapterSpec, options: ReadOptions) -> Path | None:
    """The base model that a person named, or a directory beside the adapter; never a download."""
    if options.base_model is not None:
        return options.base_model
    named = spec.config.get("base_model_name_or_path")
    if spec.config_path is None or not isinstance(named, str) or not named:
        return None
    adapter_dir = spec.config_path.parent
    candidate = Path(os.path.realpath(adapter_dir.parent / named))
    inside = candidate.is_relative_to(os.path.realpath(adapter_dir.parent)) and candidate != adapter_dir
    return candidate if not os.path.isabs(named) and inside and weight_sets(list_names(candidate)) else None


def _read_base(directory: Path) -> CheckpointManifest:
    found = _FILES.find(Path(os.path.abspath(directory)))
    if not found:
        raise NotACheckpointError(
            "the base model is not a Hugging Face model directory",
            file=directory,
            fix="name a directory with config.json and model.safetensors with --base-model",
        )
    base = _FILES.read(found[0], ReadOptions())
    if base.adapter is not None:
        raise UnsupportedCheckpointError(
            "the base model holds an adapter itself", file=directory, fix="merge that one first"
        )
    return base
