"""PEFT directories: ``adapter_config.json`` and ``adapter_model.safetensors``; the base model is somewhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckptflow.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    InconsistentCheckpointError,
    NotACheckpointError,
    UnsupportedCheckpointError,
)
from ckptflow.formats.base import Completeness, Location, ReadOptions
from ckptflow.formats.files import list_names
from ckptflow.formats.huggingface import (
    TRAINER_STATE,
    HuggingFaceDirectory,
    config_directory,
    unfinished_trainer_save,
)
from ckptflow.formats.peft_config import CONFIG_NAME, read_adapter_config
from ckptflow.formats.torch_tensors import refuse_placeholders
from ckptflow.formats.weight_sets import left_out_files, weight_sets
from ckptflow.manifest import AdapterSpec, CheckpointManifest
from ckptflow.tensors import TensorSource
from ckptflow.transforms.fqn import PEFT_PREFIX
from ckptflow.transforms.lora_config import check_base_unchanged, check_supported
from ckptflow.transforms.lora_parts import refuse_empty

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_FILES = HuggingFaceDirectory()


class PeftAdapter:
    """The layout ``peft``."""

    layout = "peft"
    supersedes: tuple[str, ...] = ("huggingface",)

    def find(self, path: Path) -> list[Location]:
        """See ``Format.find``."""
        names = list_names(path)
        if not {CONFIG_NAME, *WEIGHTS} & set(names) or weight_sets(names):
            return []
        return [Location(layout=self.layout, path=path, root=path)]

    def check(self, location: Location) -> Completeness:
        """See ``Format.check``."""
        try:
            read_adapter_config(location.path / CONFIG_NAME, location.root)
            refuse_placeholders(_adapter_tensors(location).tensors, location.path)
        except CheckpointError as error:
            unfinished = isinstance(error, IncompleteCheckpointError) and unfinished_trainer_save(location.path)
            reason = f"{error.what}: {Path(error.file).name}" if error.file else error.what
            return Completeness(state="in-progress" if unfinished else "incomplete", reason=reason)
        if unfinished_trainer_save(location.path):
            return Completeness(
                state="in-progress", reason=f"{TRAINER_STATE}, which the trainer writes last, is missing"
            )
        return Completeness(state="complete", reason="the adapter's config and tensors are whole")

    def read(self, location: Location, options: ReadOptions) -> CheckpointManifest:
        """See ``Format.read``. Without a base model the manifest holds the adapter's tensors only."""
        config_path = location.path / CONFIG_NAME
        config = read_adapter_config(config_path, location.root)
        check_supported(config, config_path)
        adapter = _adapter_tensors(location)
        spec = AdapterSpec(config=config, prefix=PEFT_PREFIX, config_path=config_path, separate=True)
        names = list_names(location.path)
        weights = next(name for name in WEIGHTS if name in names)
        alone = replace(
            adapter,
            layout=self.layout,
            path=location.path,
            global_step=location.global_step,
            left_out=(*adapter.left_out, *left_out_files(names, [weights], location.path)),
            config_dir=config_directory(location.path, options),
            adapter=spec,
        )
        base_dir = _base_directory(location, config, options)
        if base_dir is None:
            return alone
        check_base_unchanged(config, config_path)
        return _with_base(alone, _read_base(base_dir), options)


def _adapter_tensors(location: Location) -> CheckpointManifest:
    names = list_names(location.path)
    weights = next((name for name in WEIGHTS if name in names), None)
    if weights is None:
        raise IncompleteCheckpointError(
            "the adapter's weights are missing", file=location.path, expected=" or ".join(WEIGHTS)
        )
    path = location.path / weights
    manifest = _FILES.read(Location(layout="huggingface", path=path, root=location.root), ReadOptions())
    for fqn, source in manifest.tensors.items():
        refuse_empty(fqn, source)
        if not fqn.startswith(PEFT_PREFIX):
            raise UnsupportedCheckpointError(
                "a tensor of an adapter that has no PEFT name",
                file=path,
                tensor=fqn,
                expected=f"names that begin with {PEFT_PREFIX}",
            )
    # A tensor under two names is two tensors of the adapter: PEFT loads each by its name.
    tied: dict[str, TensorSource] = {alias: manifest.tensors[owner] for alias, owner in manifest.ties.items()}
    return replace(manifest, tensors={**manifest.tensors, **tied}, ties={}, adapter=None, notes=())


def _base_directory(location: Location, config: Mapping[str, object], options: ReadOptions) -> Path | None:
    """The base model that a person named, or a directory beside the adapter; never a download."""
    if options.base_model is not None:
        return options.base_model
    named = config.get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        return None
    parent = location.path.parent
    candidate = Path(os.path.realpath(parent / named))
    inside = candidate.is_relative_to(os.path.realpath(parent)) and candidate != location.path
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


def _with_base(alone: CheckpointManifest, base: CheckpointManifest, options: ReadOptions) -> CheckpointManifest:
    both = set(alone.tensors) & set(base.tensors)
    if both:
        raise InconsistentCheckpointError(
            "adapter and base model have a tensor of one name", file=base.path, tensor=min(both)
        )
    return replace(
        alone,
        tensors={**base.tensors, **alone.tensors},
        ties=base.ties,
        equal=base.equal,
        left_out=(*base.left_out, *alone.left_out),
        files=(*base.files, *alone.files),
        storage_bytes=base.storage_bytes + alone.storage_bytes,
        wasted_bytes=base.wasted_bytes + alone.wasted_bytes,
        config_dir=options.config_dir or base.config_dir,
        notes=(*base.notes, *alone.notes, f"base model: {base.path}"),
    )
