"""Directories of DCP's Hugging Face storage writer: safetensors files that hold slices of tensors under full names.

``shard-00002-model-00001-of-00003.safetensors`` is rank 2's part of weight file 1; ``DCP_SHARDING_INFO`` in its
metadata has the offsets of each slice. There is no file that tells the global shapes or the number of ranks
(https://github.com/pytorch/pytorch/blob/main/torch/distributed/checkpoint/hf_storage.py).
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from ckptflow.errors import (
    CheckpointError,
    CorruptFileError,
    IncompleteCheckpointError,
    InconsistentCheckpointError,
    VerificationError,
)
from ckptflow.files.jsonfiles import parse_json_object
from ckptflow.formats.base import Completeness, Location, ReadOptions
from ckptflow.formats.config_files import find_config_dir, read_config
from ckptflow.formats.files import list_names
from ckptflow.formats.safetensors_header import SafetensorsFile, read_safetensors
from ckptflow.formats.verdicts import YOUNG_SECONDS, newest_mtime, refused
from ckptflow.formats.written_together import check_no_newer_part, check_written_together
from ckptflow.manifest import CheckpointManifest
from ckptflow.tensors import Shape, TensorSource, check_tiling, place
from ckptflow.transforms.ties import EMBEDDINGS

SHARD_FILE = re.compile(r"shard-(?P<rank>\d+)-model-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
SHARDING_INFO = "DCP_SHARDING_INFO"
NUMBER = re.compile(r"\.\d+(?=\.)")
NO_CONFIG = "without a config.json the files of the last ranks could be missing unnoticed"
OTHER_CONFIG = (
    "config.json tells the size of no tensor that is here: the files of the last ranks could be missing unnoticed"
)
MISSING_RANK = "copy or save the checkpoint again: the files of a rank are missing"


@dataclass(slots=True)
class _Slices:
    """The parts of one tensor that were found so far."""

    parts: list[tuple[Shape, TensorSource]] = field(default_factory=list)

    def joined(self) -> TensorSource:
        """The global tensor; its size is the largest end of a slice, since no file tells it."""
        first = self.parts[0][1]
        shape = tuple(max(o[dim] + s.shape[dim] for o, s in self.parts) for dim in range(len(first.shape)))
        return place(shape, first.dtype, self.parts)


class DcpHuggingFaceShards:
    """What ``HuggingFaceStorageWriter(save_distributed=True)`` leaves before consolidation."""

    layout = "dcp-hf"
    supersedes: tuple[str, ...] = ("huggingface",)

    def find(self, path: Path) -> list[Location]:
        """A directory with sharded weight files."""
        if not any(SHARD_FILE.fullmatch(name) for name in list_names(path)):
            return []
        root = path.parent if path.name == "sharded" else path
        return [Location(layout=self.layout, path=path, root=root)]

    def check(self, location: Location) -> Completeness:
        """All files parse to the end and their slices fill their tensors."""
        config_dir = find_config_dir(location.path, location.root)
        try:
            tensors = _join(_read_files(location))
            rows = None if config_dir is None else _check_rows(tensors, config_dir)
        except CheckpointError as error:
            return refused(error, location.path)
        reason = f"the slices of {len(tensors)} tensors fill their shapes"
        if rows is None and time.time() - newest_mtime(location.path) < YOUNG_SECONDS:
            return Completeness(state="in-progress", reason=f"{reason}, but more ranks may follow")
        return Completeness(state="complete", reason=reason)

    def read(self, location: Location, options: ReadOptions) -> CheckpointManifest:
        """Join the slices, and hold the shapes to the model that the config describes."""
        files = _read_files(location)
        tensors = _join(files)
        config_dir = options.config_dir or find_config_dir(location.path, location.root)
        note, doubt = _check_shapes(tensors, config_dir)
        ranks = {int(match["rank"]) for name in files if (match := SHARD_FILE.fullmatch(name))}
        return CheckpointManifest(
            layout=self.layout,
            path=location.path,
            global_step=location.global_step,
            world_size=max(ranks),
            tensors=tensors,
            files=tuple(found.file for found in files.values()),
            storage_bytes=sum(source.nbytes for source in tensors.values()),
            config_dir=config_dir,
            doubt=doubt,
            notes=("the number of ranks and the global shapes are inferred from the slices that are there", note),
        )


def _read_files(location: Location) -> dict[str, SafetensorsFile]:
    found = {name: SHARD_FILE.fullmatch(name) for name in list_names(location.path)}
    matches = {name: match for name, match in found.items() if match}
    if not matches:
        raise IncompleteCheckpointError("the files of all ranks are gone", file=location.path)
    counts = {int(match["count"]) for match in matches.values()}
    if len(counts) > 1:
        raise InconsistentCheckpointError(
            "files of two saves lie together",
            file=location.path,
            expected="one number after -of-",
            found=", ".join(map(str, sorted(counts))),
        )
    ranks = {int(match["rank"]) for match in matches.values()}
    absent = sorted(set(range(1, max(ranks, default=0) + 1)) - ranks)
    if absent:
        raise IncompleteCheckpointError(
            "the files of a rank are missing", file=location.path, found=f"no shard-{absent[0]:05d}-…", fix=MISSING_RANK
        )
    numbers = {int(match["number"]) for match in matches.values()}
    lost = sorted(set(range(1, max(counts) + 1)) - numbers)
    if lost:
        raise IncompleteCheckpointError(
            "a weight file is missing in all ranks' files",
            file=location.path,
            found=f"no shard-…-model-{lost[0]:05d}-of-{max(counts):05d}.safetensors",
            fix="copy or save the checkpoint again",
        )
    headers = {name: read_safetensors(location.path / name, location.root) for name in matches}
    files = [header.file for header in headers.values()]
    check_no_newer_part(location.path, files)
    check_written_together(files)
    return headers


def _join(files: dict[str, SafetensorsFile]) -> dict[str, TensorSource]:
    slices: dict[str, _Slices] = {}
    for found in files.values():
        offsets = _offsets(found)
        for fqn, source in found.tensors.items():
            at = offsets.get(fqn)
            if at is None or len(at) != len(source.shape):
                raise CorruptFileError(
                    "a slice has no offsets in DCP_SHARDING_INFO", file=found.file.path, tensor=fqn, found=at
                )
            known = slices.setdefault(fqn, _Slices())
            if known.parts and (known.parts[0][1].dtype, len(known.parts[0][0])) != (source.dtype, len(at)):
                raise InconsistentCheckpointError(
                    "slices of one tensor differ in dtype or rank",
                    file=found.file.path,
                    tensor=fqn,
                    expected=known.parts[0][1].dtype.name,
                    found=source.dtype.name,
                )
            known.parts.append((at, source))
    tensors = {fqn: known.joined() for fqn, known in slices.items()}
    for fqn, source in tensors.items():
        check_tiling(fqn, source)
    return tensors


def _offsets(found: SafetensorsFile) -> dict[str, Shape]:
    text = found.metadata.get(SHARDING_INFO)
    if text is None:
        raise CorruptFileError("a sharded weight file has no DCP_SHARDING_INFO", file=found.file.path)
    offsets: dict[str, Shape] = {}
    for fqn, entry in parse_json_object(text.encode(), found.file.path).items():
        values = entry.get("saved_offsets") if isinstance(entry, dict) else None
        if not isinstance(values, list) or not all(type(v) is int and 0 <= v < 2**63 for v in values):
            raise CorruptFileError("DCP_SHARDING_INFO is malformed", file=found.file.path, tensor=fqn, found=entry)
        offsets[fqn] = tuple(values)
    return offsets


def _check_rows(tensors: dict[str, TensorSource], config_dir: Path) -> int | None:
    """Rows of the embedding, which must be one or more for each token; None where config or names don't tell.

    Raises:
        IncompleteCheckpointError: there are fewer: the last ranks' files are missing.
    """
    config = read_config(config_dir)
    nested = config.get("text_config")
    vocabulary = config.get("vocab_size", nested.get("vocab_size") if isinstance(nested, dict) else None)
    fqn, found = next(((fqn, source) for fqn, source in tensors.items() if fqn.endswith(EMBEDDINGS)), ("", None))
    if found is None or type(vocabulary) is not int or not found.shape:
        return None
    if found.shape[0] < vocabulary:
        raise IncompleteCheckpointError(
            "the slices give a smaller tensor than the config describes",
            file=config_dir,
            tensor=fqn,
            expected=f"{vocabulary} rows in the embedding",
            found=f"{found.shape[0]} rows",
            fix=MISSING_RANK,
        )
    return found.shape[0]


def _check_shapes(tensors: dict[str, TensorSource], config_dir: Path | None) -> tuple[str, str | None]:
    """The last rank's files can be missing without a gap: only the model tells how large its tensors are.

    Returns:
        What was compared, for people; and why the tensors may be cut off, None where they can't be.
    """
    from ckptflow.validate.skeleton import describe_model

    if config_dir is None:
        return NO_CONFIG, NO_CONFIG
    rows = _check_rows(tensors, config_dir)
    try:
        skeleton = describe_model(config_dir)
    except VerificationError as error:
        wanted, tied, why = {}, set(), error.what
    else:
        tied = {*skeleton.tied, *skeleton.tied.values()}
        wanted, why = {**skeleton.live_shapes, **skeleton.shapes}, skeleton.unavailable or "it names other tensors"
    known = {fqn: source for fqn, source in tensors.items() if fqn in wanted}
    for fqn, source in known.items():
        if wanted[fqn] != source.shape:
            raise IncompleteCheckpointError(
                "the slices give a smaller tensor than the config describes",
                tensor=fqn,
                expected=f"shape {list(wanted[fqn])}",
                found=f"shape {list(source.shape)}",
                fix=MISSING_RANK,
            )
    _check_layers(tensors, set(wanted) - tied)
    if known:
        return "shapes agree with the model that the config describes", None
    if rows is not None:
        return f"only the rows of the embedding could be held to the config: {why}", None
    return f"shapes could not be held to the config: {why}", OTHER_CONFIG


def _check_layers(tensors: dict[str, TensorSource], wanted: set[str]) -> None:
    """Pipeline stages hold whole layers: those of a stage that is missing leave no gap either."""
    kinds = {NUMBER.sub(".*", fqn) for fqn in tensors}
    absent = next((fqn for fqn in sorted(wanted) if fqn not in tensors and NUMBER.sub(".*", fqn) in kinds), None)
    if absent is not None:
        raise IncompleteCheckpointError(
            "a layer or expert that the config describes is in no file", tensor=absent, fix=MISSING_RANK
        )
