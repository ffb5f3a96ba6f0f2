"""Whether ``.metadata`` and the data files beside it are one whole save.

DCP writes all data files, then ``.metadata.tmp``, then renames it to ``.metadata``. Writing again into the same
directory replaces the data files one by one while the old ``.metadata`` still stands: names and sizes are then the
same, and values of two steps would be mixed without an error. Nothing in the format ties the two together, so every
trace that a save leaves is compared.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from ckptflow.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    InconsistentCheckpointError,
    UnsupportedCheckpointError,
)
from ckptflow.formats.base import Completeness
from ckptflow.formats.dcp_metadata import DcpMetadata, DcpTensor, parse_metadata
from ckptflow.formats.dcp_records import STALE, DcpFiles
from ckptflow.formats.dcp_subtree import OPTIMIZER, TrainingState
from ckptflow.formats.files import checked_file, list_names
from ckptflow.formats.safetensors_header import starts_as_safetensors
from ckptflow.formats.written_together import check_written_together
from ckptflow.tensors import SourceFile

METADATA = ".metadata"
PARTIAL_METADATA = ".metadata.tmp"
DATA_SUFFIX = ".distcp"
RANK_METADATA = re.compile(r"__\d+\.metadata")
# Clocks of several writers differ a little, and copies of small checkpoints land within it in any order.
CLOCK_TOLERANCE_NS = 2 * 10**9
STEP_DIRECTORY = re.compile(r"(?P<stem>(?:global_?step|step|checkpoint|ckpt|iter|iteration)[._=-]?)(?P<step>\d+)")
# The shortest end-of-directory record of a zip file.
ZIP_END_BYTES = 22
# Step counters to look at: per file, and files.
STEPS_PER_FILE = 6
FILES_WITH_STEPS = 64


def read_metadata(directory: Path, root: Path) -> DcpMetadata:
    """Parse ``.metadata``.

    Raises:
        IncompleteCheckpointError: it is not there yet.
        CheckpointError: any other subclass: it can't be read.
    """
    path = directory / METADATA
    names = list_names(directory)
    if METADATA not in names and any(RANK_METADATA.fullmatch(name) for name in names):
        raise UnsupportedCheckpointError(
            "each rank wrote a .metadata of its own (save without collectives)",
            file=directory,
            fix="load and save it again with torch.distributed.checkpoint and use_collectives=True",
        )
    if METADATA not in names:
        raise IncompleteCheckpointError(
            "the checkpoint has no .metadata, which is written last",
            file=directory,
            found=f"{sum(name.endswith(DATA_SUFFIX) for name in names)} data files",
            fix="wait until the save is done; a save that was killed can't be read",
        )
    checked_file(path, root)
    try:
        return parse_metadata(path.read_bytes(), path)
    except FileNotFoundError as error:
        raise IncompleteCheckpointError("the checkpoint vanished while it was read", file=path) from error


def check_files(metadata: DcpMetadata, directory: Path, root: Path) -> None:
    """Every data file is there, exactly as long as its entries, and written right before ``.metadata``.

    Raises:
        IncompleteCheckpointError: a file is missing, short, or being written again.
        InconsistentCheckpointError: a file holds more than ``.metadata`` knows.
        UnsupportedCheckpointError: the files are safetensors.
    """
    written = checked_file(directory / METADATA, root)
    files = [written]
    for name, end in sorted(metadata.file_ends.items()):
        file = checked_file(directory / name, root)
        files.append(file)
        if file.nbytes != end and starts_as_safetensors(Path(file.path)):
            raise UnsupportedCheckpointError(
                "the data files are safetensors, and .metadata doesn't tell where a tensor lies in them",
                file=file.path,
                expected="files that FileSystemWriter wrote with SerializationFormat.TORCH_SAVE, its default",
                found="SerializationFormat.SAFETENSORS, which gives all tensors the offset 0",
                fix="save it with the default format, or with HuggingFaceStorageWriter",
            )
        if file.nbytes < end:
            raise IncompleteCheckpointError(
                "a data file is shorter than .metadata says",
                file=file.path,
                expected=f"{end} bytes",
                found=f"{file.nbytes} bytes",
                fix="wait until it is written or copied, or take another checkpoint",
            )
        if file.nbytes > end:
            raise InconsistentCheckpointError(
                "a data file is longer than .metadata says",
                file=file.path,
                expected=f"{end} bytes",
                found=f"{file.nbytes} bytes",
                fix=STALE,
            )
        _check_ends(file)
        if file.mtime_ns > written.mtime_ns + CLOCK_TOLERANCE_NS:
            raise IncompleteCheckpointError(
                "a data file is younger than .metadata, which is written last: a newer save into this directory has "
                "not finished",
                file=file.path,
                expected="a time before that of .metadata",
                found=f"{(file.mtime_ns - written.mtime_ns) / 10**9:.0f} s after it",
                fix="wait for the save to finish; if the files were only copied without their times, touch all of "
                "them, .metadata last",
            )
    partial = directory / PARTIAL_METADATA
    if partial.exists() and partial.stat().st_mtime_ns > written.mtime_ns:
        raise IncompleteCheckpointError(
            "a newer save into this directory has not finished", file=partial, fix="wait until it is renamed"
        )
    check_written_together(files)


def _check_ends(file: SourceFile) -> None:
    """The first entry begins, and the last one ends, as zip files do: not with zeros that a crash left."""
    with open(file.path, "rb") as stream:
        edges = (stream.read(4), os.pread(stream.fileno(), ZIP_END_BYTES, max(0, file.nbytes - ZIP_END_BYTES)))
    if not all(map(any, edges)):
        raise IncompleteCheckpointError(
            "a data file begins or ends with zeros: its space was reserved and never written",
            file=file.path,
            fix="take another checkpoint, or copy the file again",
        )


def completeness(
    directory: Path, root: Path, also: Callable[[DcpMetadata], None] = lambda metadata: None
) -> Completeness:
    """The same as a state, for somebody who watches the directory; ``also`` raises for what it finds wrong."""
    names = list_names(directory)
    if METADATA not in names:
        return Completeness(state="in-progress", reason=".metadata, which is written last, is not there yet")
    try:
        metadata = read_metadata(directory, root)
        check_files(metadata, directory, root)
        check_one_save(metadata, directory, DcpFiles(directory, root))
        also(metadata)
    except CheckpointError as error:
        growing = isinstance(error, IncompleteCheckpointError) and "newer save" in error.what
        where = f": {Path(error.file).name}" if error.file else ""
        return Completeness(state="in-progress" if growing else "incomplete", reason=error.what + where)
    except FileNotFoundError:
        return Completeness(state="incomplete", reason="files vanish while they are looked at")
    return Completeness(state="complete", reason=f".metadata and {len(metadata.file_ends)} data files at full length")


def check_one_save(metadata: DcpMetadata, directory: Path, files: DcpFiles) -> None:
    """Compare the traces that the save left: the path that it went to, and its step counters.

    Raises:
        InconsistentCheckpointError: ``.metadata`` and data files, or data files among themselves, are of two saves.
    """
    _check_saved_path(metadata.checkpoint_id, directory)
    _check_train_step(metadata, directory, files)
    _check_optimizer_steps(metadata, directory, files)


def _check_saved_path(saved_to: PurePosixPath | None, directory: Path) -> None:
    """``.metadata`` records where it was saved; another step number in the same place of the path gives it away."""
    for saved, found in zip(reversed(saved_to.parts if saved_to else ()), reversed(directory.parts), strict=False):
        was, now = STEP_DIRECTORY.fullmatch(saved), STEP_DIRECTORY.fullmatch(found)
        if was and now and was["stem"] == now["stem"]:
            if int(was["step"]) != int(now["step"]):
                raise InconsistentCheckpointError(
                    ".metadata was written for another step",
                    file=directory / METADATA,
                    expected=found,
                    found=str(saved_to),
                    fix=STALE,
                )
            return


def _check_train_step(metadata: DcpMetadata, directory: Path, files: DcpFiles) -> None:
    """Torchtitan's ``train_state.step`` is the N of its ``step-N``."""
    named = STEP_DIRECTORY.fullmatch(directory.name)
    if named is None or named["stem"] != "step-":
        return
    for key, tensor in metadata.tensors.items():
        if metadata.path_of(key) == ("train_state", "step"):
            step, number = _number(key, tensor, files), int(named["step"])
            if step is not None and step != number:
                raise InconsistentCheckpointError(
                    "the data files are of another step",
                    file=directory,
                    tensor=key,
                    expected=number,
                    found=f"{step:g}",
                    fix=STALE,
                )


def _check_optimizer_steps(metadata: DcpMetadata, directory: Path, files: DcpFiles) -> None:
    """Adam counts steps per parameter, and DCP spreads the counters over all files.

    Parameters that rarely get a gradient count less, in any file. Files whose counters have no number in common, or
    that each have one number and not all the same, are of different saves.
    """
    states = TrainingState(metadata)
    by_file: dict[str, list[tuple[str, DcpTensor]]] = {}
    for key, tensor in metadata.tensors.items():
        tree = metadata.path_of(key)
        at = states.depth_of(tree, 0)
        is_counter = at is not None and states.name_of(tree, at) == OPTIMIZER and str(tree[-1]).endswith("step")
        if is_counter and not tensor.shape and len(tensor.chunks) == 1:
            by_file.setdefault(tensor.chunks[0].record.file_name, []).append((key, tensor))
    steps: dict[str, set[float]] = {}
    for name, counters in sorted(by_file.items())[:FILES_WITH_STEPS]:
        steps[name] = set(_numbers(counters[:STEPS_PER_FILE], files))
    seen = [values for values in steps.values() if values]
    disjoint = len(seen) > 1 and all(a.isdisjoint(b) for i, a in enumerate(seen) for b in seen[:i])
    if disjoint or (all(len(values) == 1 for values in seen) and len(set().union(*seen)) > 1):
        raise InconsistentCheckpointError(
            "the data files are of different steps",
            file=directory,
            expected="one step count in the optimizer state of all files",
            found=", ".join(f"{name}: {sorted(values)}" for name, values in list(steps.items())[:4]),
            fix=STALE,
        )


def _numbers(counters: list[tuple[str, DcpTensor]], files: DcpFiles) -> Iterator[float]:
    for key, tensor in counters:
        value = _number(key, tensor, files)
        if value is not None:
            yield value


def _number(key: str, tensor: DcpTensor, files: DcpFiles) -> float | None:
    """The value of a 0-d counter; None for dtypes that no trainer counts in."""
    code = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}.get(tensor.dtype.name)
    if code is None or tensor.shape or not tensor.chunks:
        return None
    return float(struct.unpack(code, files.scalar_bytes(key, tensor))[0])
