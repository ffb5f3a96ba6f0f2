"""The 16-bit copy that Hugging Face's Trainer puts beside DeepSpeed's folder: the masters must round to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptflow.errors import CheckpointError
from ckptflow.formats.base import Location
from ckptflow.formats.deepspeed_weights import ROUNDS
from ckptflow.formats.files import list_names
from ckptflow.formats.safetensors_header import read_safetensors
from ckptflow.manifest import EqualSources, LeftOut
from ckptflow.tensors import SourceFile, TensorSource

# Only the Trainer writes this; a model.safetensors without it may be the model that training began with.
_TRAINER_STATE = "trainer_state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBeside:
    """What a copy beside the folder adds to the manifest."""

    equal: tuple[EqualSources, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    files: tuple[SourceFile, ...] = ()
    notes: tuple[str, ...] = ()


def prove_by_copy_beside(location: Location, tensors: Mapping[str, TensorSource], proven: set[str]) -> CopyBeside:
    """Compare masters that nothing inside the folder proves with the Trainer's copy.

    A copy that can't be read proves nothing and spoils nothing; a note says so.
    """
    names = list_names(location.root) if location.root != location.path else []
    copies = [name for name in names if name.endswith(".safetensors")]
    if not copies or _TRAINER_STATE not in names:
        return CopyBeside()
    left_out = tuple(
        LeftOut(
            name=name,
            reason="16-bit copy of the masters, which are written instead",
            nbytes=_size(location.root / name),
        )
        for name in copies
    )
    if proven >= set(tensors):
        return CopyBeside(left_out=left_out)
    try:
        read = [read_safetensors(location.root / name, location.root) for name in copies]
    except CheckpointError as error:
        return CopyBeside(left_out=left_out, notes=(f"the copy beside the folder was not compared: {error.what}",))
    found = {fqn: source for file in read for fqn, source in file.tensors.items()}
    equal = tuple(
        EqualSources(fqn=fqn, first=master, second=found[fqn], reason=ROUNDS)
        for fqn, master in tensors.items()
        if fqn in found and fqn not in proven and master.shape == found[fqn].shape and master.numel
    )
    return CopyBeside(equal=equal, left_out=left_out, files=tuple(file.file for file in read) if equal else ())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
