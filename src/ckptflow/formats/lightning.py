"""Lightning's ``.ckpt`` files: a torch file with ``state_dict`` beside optimizer, loop and callback states.

Fabric's, which hold what a person gave under the names that he gave, are read as any single torch file.
Sharded directories under the same name are DeepSpeed's (``x.ckpt/checkpoint``) or DCP's, and are read as those.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckptflow.formats.base import Completeness, Location, ReadOptions
from ckptflow.formats.config_files import find_config_dir
from ckptflow.formats.files import list_names
from ckptflow.formats.full_state_dict import FullStateDict
from ckptflow.formats.nested_state_dict import StateDictFile, open_mapping, read_state_dict
from ckptflow.formats.peft_config import CONFIG_NAME, adapter_spec
from ckptflow.formats.verdicts import check_whole_file
from ckptflow.manifest import AdapterSpec, CheckpointManifest, LeftOut
from ckptflow.transforms.fqn import PEFT_PREFIX, is_peft_name

SUFFIX = ".ckpt"
STATE_DICT, VERSION = "state_dict", "pytorch-lightning_version"
# A torch file is a zip, or in the old format a pickle of protocol 2.
_TORCH_MAGICS = (b"PK\x03\x04", b"\x80\x02")
_REASONS = {
    "optimizer_states": "optimizer state, not weights",
    "lr_schedulers": "learning rate schedule, not weights",
    "callbacks": "state of callbacks, not weights",
    "loops": "progress of the training loop, not weights",
    "hyper_parameters": "hyperparameters, not weights",
    # Of the callback WeightAveraging, whose average is the state_dict.
    "current_model_state": "the weights as they are trained on; the state_dict holds their average",
    "averaging_state": "progress of the average, not weights",
}


class LightningCheckpoint:
    """One ``.ckpt`` file; each file of a directory is a checkpoint of its own."""

    layout = "lightning"
    supersedes: tuple[str, ...] = ()

    def find(self, path: Path) -> list[Location]:
        """See ``Format.find``. A ``last.ckpt`` that only links to another file of the directory is that file."""
        if path.suffix == SUFFIX and path.is_file():
            return [Location(layout=self.layout, path=path, root=path.parent)] if _is_torch_file(path) else []
        names = [name for name in list_names(path) if name.endswith(SUFFIX) and not _is_link_beside(path / name)]
        return [
            Location(layout=self.layout, path=path / name, root=path) for name in names if _is_torch_file(path / name)
        ]

    def check(self, location: Location) -> Completeness:
        """See ``Format.check``: Lightning writes the file in one go, so it is complete if it is whole."""
        return check_whole_file(self, location)

    def read(self, location: Location, options: ReadOptions) -> CheckpointManifest:
        """See ``Format.read``. Names keep the module's attribute; ``wrapped`` says so."""
        file, torch, top = open_mapping(location.path, location.root)
        if STATE_DICT not in top:
            return FullStateDict().read(location, options)
        held = read_state_dict(file, torch, top, (STATE_DICT,), _REASONS)
        step, version, folder = top.get("global_step"), top.get(VERSION), location.path.parent
        inner, adapter, adapter_notes = _behind_peft(held, folder, location.root)
        return CheckpointManifest(
            layout=self.layout,
            path=location.path,
            global_step=step if type(step) is int else location.global_step,
            tensors=inner.tensors,
            ties=inner.ties,
            left_out=inner.left_out,
            files=(held.file,),
            storage_bytes=held.storage_bytes,
            wasted_bytes=held.wasted_bytes,
            # Trainers keep config.json beside the files, or beside the directory checkpoints/ that holds them.
            config_dir=options.config_dir or find_config_dir(folder, folder.parent),
            wrapped=adapter is None,
            adapter=adapter,
            notes=(*((f"Lightning {version}",) if isinstance(version, str) else ()), *adapter_notes, *held.notes),
        )


def _behind_peft(
    held: StateDictFile, folder: Path, root: Path
) -> tuple[StateDictFile, AdapterSpec | None, Sequence[str]]:
    """The model that PEFT wrapped without the attribute that holds it; its names tell where that is, no config does."""
    names = [*held.tensors, *held.ties]
    before = {name.partition(PEFT_PREFIX)[0] for name in names if PEFT_PREFIX in name}
    attribute = min(before, default="")
    if len(before) != 1 or attribute[-1:] not in ("", ".") or not any(map(is_peft_name, names)):
        return held, None, ()
    tensors = {name: held.tensors[held.ties.get(name, name)] for name in names}
    inside = {name: name.removeprefix(attribute) for name in names if name.startswith(attribute + PEFT_PREFIX)}
    ties = {inside[a]: inside[o] for a, o in held.ties.items() if a in inside and o in inside}
    inner = replace(
        held,
        tensors={short: tensors[name] for name, short in inside.items() if short not in ties},
        ties=ties,
        left_out=(
            *held.left_out,
            *(
                LeftOut(name=name, reason="not part of the model that PEFT wrapped", nbytes=source.nbytes)
                for name, source in held.tensors.items()
                if name not in inside
            ),
        ),
    )
    adapter, notes = adapter_spec(inner.tensors, folder / CONFIG_NAME, root)
    return inner, adapter, notes


def _is_torch_file(path: Path) -> bool:
    """Whether it begins as one, or is too short to tell: a file whose writing has just begun."""
    try:
        with open(path, "rb") as stream:
            head = stream.read(4)
    except OSError:
        return False
    return any(magic.startswith(head[: len(magic)]) for magic in _TORCH_MAGICS)


def _is_link_beside(path: Path) -> bool:
    if not path.is_symlink():
        return False
    real = Path(os.path.realpath(path))
    return real.parent == Path(os.path.realpath(path.parent)) and real.exists()
