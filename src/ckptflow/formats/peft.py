"""PEFT directories: ``adapter_config.json`` and ``adapter_model.safetensors``; the base model is somewhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckptflow.errors import CheckpointError, IncompleteCheckpointError, UnsupportedCheckpointError
from ckptflow.formats.base import Completeness, Location, ReadOptions
from ckptflow.formats.dcp import DcpDirectory
from ckptflow.formats.files import list_names
from ckptflow.formats.huggingface import (
    TRAINER_STATE,
    HuggingFaceDirectory,
    config_directory,
    unfinished_trainer_save,
)
from ckptflow.formats.peft_base import join_base
from ckptflow.formats.peft_config import CONFIG_NAME, read_adapter_config
from ckptflow.formats.torch_tensors import refuse_placeholders
from ckptflow.formats.weight_sets import left_out_files, weight_sets
from ckptflow.manifest import AdapterSpec, CheckpointManifest
from ckptflow.tensors import TensorSource
from ckptflow.transforms.fqn import PEFT_PREFIX
from ckptflow.transforms.lora_config import check_supported
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
        if not set(WEIGHTS) & set(names) and DcpDirectory().find(path):
            return []  # LoRA in a sharded checkpoint, with what the trainer was told about it
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
        return join_base(alone, spec, options)


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
