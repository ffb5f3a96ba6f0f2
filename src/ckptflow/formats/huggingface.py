"""Hugging Face directories, and single safetensors files."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptflow.errors import CheckpointError, CorruptFileError, IncompleteCheckpointError, InconsistentCheckpointError
from ckptflow.files.kinds import RECORD_NAME
from ckptflow.formats.base import Completeness, Location, ReadOptions
from ckptflow.formats.files import checked_file, list_names
from ckptflow.formats.peft_config import CONFIG_NAME, adapter_spec
from ckptflow.formats.run_tracker import TRUSTED_SECONDS
from ckptflow.formats.safetensors_header import read_safetensors
from ckptflow.formats.torch_tensors import (
    overlap_notes,
    refuse_placeholders,
    shared_windows,
    source_of,
    state_dict_entries,
    storage_use,
)
from ckptflow.formats.verdicts import newest_mtime, refused
from ckptflow.formats.weight_index import check_weight_map, read_weight_map
from ckptflow.formats.weight_sets import (
    NOT_WEIGHTS,
    WeightSet,
    choose_weights,
    left_out_files,
    shard_count,
    weight_sets,
)
from ckptflow.formats.written_together import check_no_newer_part, check_written_together
from ckptflow.manifest import CheckpointManifest, LeftOut
from ckptflow.tensors import SourceFile, TensorSource
from ckptflow.torchfiles import LazyTensor, open_torch_file
from ckptflow.transforms.fqn import model_names

TRAINER_DIRECTORY = re.compile(r"^checkpoint-\d+$")
TRAINER_STATE = "trainer_state.json"


class HuggingFaceDirectory:
    """The layout ``huggingface``."""

    layout = "huggingface"
    supersedes: tuple[str, ...] = ()

    def find(self, path: Path) -> list[Location]:
        """See ``Format.find``."""
        if path.is_dir():
            return [Location(layout=self.layout, path=path, root=path)] if weight_sets(list_names(path)) else []
        other = any(pattern.match(path.name) for pattern, _ in NOT_WEIGHTS)
        if other or path.suffix != ".safetensors" or not path.is_file():
            return []
        return [Location(layout=self.layout, path=path, root=path.parent)]

    def check(self, location: Location) -> Completeness:
        """See ``Format.check``."""
        try:
            for name, file in _read_files(location, _files_of(location)).items():
                refuse_placeholders(file.tensors, location.path / name)
        except CheckpointError as error:
            verdict = refused(error, location.path)
            unfinished = isinstance(error, IncompleteCheckpointError) and unfinished_trainer_save(location.path)
            return replace(verdict, state="in-progress") if unfinished else verdict
        if unfinished_trainer_save(location.path):
            return Completeness(
                state="in-progress", reason=f"{TRAINER_STATE}, which the trainer writes last, is missing"
            )
        return Completeness(state="complete", reason="all weight files are whole")

    def read(self, location: Location, options: ReadOptions) -> CheckpointManifest:
        """See ``Format.read``."""
        chosen = _files_of(location)
        held = _read_files(location, chosen)
        tensors, ties = _joined(held)
        names = model_names([*tensors, *ties])
        tensors = {names[fqn]: source for fqn, source in tensors.items()}
        directory = location.path if location.path.is_dir() else location.path.parent
        adapter, adapter_notes = adapter_spec(tensors, directory / CONFIG_NAME, location.root)
        others = left_out_files(list_names(directory), chosen.names, directory) if directory == location.path else []
        return CheckpointManifest(
            layout=self.layout,
            path=location.path,
            global_step=location.global_step,
            tensors=tensors,
            ties={names[alias]: names[owner] for alias, owner in ties.items()},
            left_out=(*(entry for file in held.values() for entry in file.left_out), *others),
            files=tuple(file.file for file in held.values()),
            storage_bytes=sum(file.storage_bytes for file in held.values()),
            wasted_bytes=sum(file.wasted_bytes for file in held.values()),
            config_dir=config_directory(directory, options),
            # The Trainer saves no config of a module that is not transformers' own; a model may lie in an attribute.
            wrapped=adapter is None and options.config_dir is not None and not (directory / "config.json").is_file(),
            adapter=adapter,
            notes=(*chosen.notes, *adapter_notes, *(note for file in held.values() for note in file.notes)),
        )


def config_directory(directory: Path, options: ReadOptions) -> Path | None:
    """The directory that a person named, or the checkpoint's own if it has a config."""
    if options.config_dir is not None:
        return options.config_dir
    return directory if (directory / "config.json").is_file() else None


def unfinished_trainer_save(directory: Path) -> bool:
    """Whether this is a Trainer's checkpoint-N directory without the file that is written last.

    Other scripts give their directories such names too: without any other file of the Trainer it counts as unfinished
    only while it is young.
    """
    if TRAINER_DIRECTORY.match(directory.name) is None or _is_written(directory / TRAINER_STATE):
        return False
    if any(pattern.match(name) for name in list_names(directory) for pattern, _ in NOT_WEIGHTS):
        return True
    return time.time() - newest_mtime(directory) < TRUSTED_SECONDS


def _is_written(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """The weight files to read, in order."""

    names: tuple[str, ...]
    index: Path = Path()
    weight_map: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What one weight file holds."""

    file: SourceFile
    tensors: Mapping[str, TensorSource]
    ties: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()
    storage_bytes: int
    wasted_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def all_names(self) -> list[str]:
        """Tensors and aliases."""
        return [*self.tensors, *self.ties]


def _files_of(location: Location) -> _Chosen:
    if not location.path.is_dir():
        return _Chosen(names=(location.path.name,))
    directory, root = location.path, location.root
    names = list_names(directory)
    sets = weight_sets(names)
    if not sets:
        raise IncompleteCheckpointError("the weight files are gone", file=directory)
    dead = {s.title for s in sets if s.index and not _is_alive(directory, root, s, set(names))}
    chosen, notes = choose_weights(sets, dead if len(sets) > 1 else set(), directory)
    if chosen.single:
        return _Chosen(names=(chosen.single,), notes=tuple(notes))
    if not chosen.index:
        if chosen.missing:
            raise _missing_shards(directory, names, f"shard {chosen.missing[0]} of {chosen.count}")
        note = "there is no index; the shards' own headers tell which tensor is where"
        return _Chosen(names=chosen.shards, notes=(*notes, note))
    index = directory / chosen.index
    weight_map = read_weight_map(index, root)
    needed = tuple(dict.fromkeys(sorted(weight_map.values())))
    absent = next((name for name in needed if name not in names), None)
    if absent is not None:
        raise _missing_shards(directory, names, absent)
    extra = [name for name in chosen.shards if name not in needed]
    own = next((name for name in extra if shard_count(name) in {shard_count(other) for other in needed}), None)
    if own is not None:
        raise InconsistentCheckpointError(
            "the index leaves out a shard of its own set",
            file=index,
            expected=f"tensors in {own}",
            fix="index or files are left over from another save; save the model again",
        )
    notes += [f"{name} is left out: {chosen.index} does not name it" for name in extra]
    return _Chosen(names=needed, index=index, weight_map=weight_map, notes=tuple(notes))


def _is_alive(directory: Path, root: Path, weights: WeightSet, names: set[str]) -> bool:
    """Whether all files that an index names are there; one that can't be read is left for the reading to refuse."""
    try:
        return set(read_weight_map(directory / weights.index, root).values()) <= names
    except IncompleteCheckpointError:
        return False
    except CorruptFileError:
        return True


def _missing_shards(directory: Path, names: list[str], missing: str) -> IncompleteCheckpointError:
    halves = [name for name in names if name.endswith((".tmp", ".part", ".partial", ".incomplete"))]
    return IncompleteCheckpointError(
        "a weight file is missing",
        file=directory / missing,
        found=f"{halves[0]}, which is still being written" if halves else None,
        fix="wait until the save has finished, or copy the missing file here",
    )


def _read_files(location: Location, chosen: _Chosen) -> dict[str, _Held]:
    """The chosen files, held against the index and each other."""
    held = {name: _read_file(location, name) for name in chosen.names}
    if chosen.weight_map is not None:
        check_weight_map(chosen.index, chosen.weight_map, {name: file.all_names for name, file in held.items()})
    files = [file.file for file in held.values()]
    check_no_newer_part(location.path, files)
    if not _is_proven_otherwise(location.path):
        check_written_together(files)
    return held


def _is_proven_otherwise(directory: Path) -> bool:
    """Whether files may be of any time: the Hub's client and ckptflow go on where they were stopped, and record hashes.

    https://huggingface.co/docs/huggingface_hub/guides/download (snapshots of the cache, and ``.cache`` of --local-dir)
    """
    downloaded = directory.parent.name == "snapshots" or (directory / ".cache" / "huggingface").is_dir()
    return downloaded or (directory / RECORD_NAME).is_file()


def _read_file(location: Location, name: str) -> _Held:
    directory = location.path if location.path.is_dir() else location.path.parent
    path = directory / name
    if path.suffix == ".safetensors":
        header = read_safetensors(path, location.root)
        data_bytes = sum(source.nbytes for source in header.tensors.values())
        return _Held(file=header.file, tensors=header.tensors, storage_bytes=data_bytes)
    file = checked_file(path, location.root)
    entries, left_out = state_dict_entries(open_torch_file(file.path).value, file.path)
    if not entries:
        raise CorruptFileError("a weight file holds no tensors", file=file.path)
    sources = {fqn: source_of(fqn, tensor, file) for fqn, tensor in entries.items()}
    ties = shared_windows(entries)
    total, wasted = storage_use(tensor for tensor in entries.values() if isinstance(tensor, LazyTensor))
    return _Held(
        file=file,
        tensors={fqn: source for fqn, source in sources.items() if fqn not in ties},
        ties=ties,
        left_out=tuple(left_out),
        storage_bytes=total,
        wasted_bytes=wasted,
        notes=tuple(overlap_notes(entries)),
    )


def _joined(held: Mapping[str, _Held]) -> tuple[dict[str, TensorSource], dict[str, str]]:
    tensors: dict[str, TensorSource] = {}
    ties: dict[str, str] = {}
    where: dict[str, str] = {}
    for name, file in held.items():
        for fqn in file.all_names:
            other = where.setdefault(fqn, name)
            if other != name:
                raise InconsistentCheckpointError(
                    "a tensor lies in two weight files",
                    file=file.file.path,
                    tensor=fqn,
                    found=f"in {other} too",
                    fix="files of two saves are mixed; save the model again",
                )
        tensors.update(file.tensors)
        ties.update(file.ties)
    return tensors, ties
