"""Identity of source files without reading them whole, and of a plan.

A full hash would cost a second pass over the checkpoint. Head, tail and samples tell apart what trainers write: the
tail of a torch file holds the crc32 of each of its storages, the head of a safetensors file its header.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptflow.errors import CheckpointError, IncompleteCheckpointError, SourceChangedError
from ckptflow.plan import ConsolidationPlan, LoraFold
from ckptflow.tensors import SourceFile, TensorSource

EDGE_BYTES = 64 * 1024
SAMPLES = 16
SAMPLE_BYTES = 4096


def source_file(path: Path) -> SourceFile:
    """The file as it is now.

    Raises:
        IncompleteCheckpointError: it is not there, or not a regular file.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise IncompleteCheckpointError("a file of the checkpoint is missing", file=path) from error
    return SourceFile(str(path), found.st_size, found.st_mtime_ns)


def check_sources_unchanged(files: Iterable[SourceFile]) -> None:
    """Look once more at files that were read.

    Raises:
        SourceChangedError: one has another size or time, or is gone.
    """
    for file in files:
        try:
            now = source_file(Path(file.path))
        except CheckpointError as error:
            raise SourceChangedError("a source file vanished during the conversion", file=file.path) from error
        if now != file:
            raise SourceChangedError(
                "a source file changed during the conversion",
                file=file.path,
                expected=f"{file.nbytes} bytes, mtime {file.mtime_ns} ns",
                found=f"{now.nbytes} bytes, mtime {now.mtime_ns} ns",
                fix="wait until the trainer is done with it, then convert again",
            )


def fingerprint_file(file: SourceFile) -> str:
    """sha256 over size, head, tail and evenly spread samples of a file, in hex.

    Modification times are left out: a copy of a checkpoint is the same checkpoint.
    """
    digest = hashlib.sha256(str(file.nbytes).encode())
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        digest.update(os.pread(fd, EDGE_BYTES, 0))
        digest.update(os.pread(fd, EDGE_BYTES, max(0, file.nbytes - EDGE_BYTES)))
        for sample in range(1, SAMPLES + 1):
            digest.update(os.pread(fd, SAMPLE_BYTES, file.nbytes * sample // (SAMPLES + 1)))
    finally:
        os.close(fd)
    return digest.hexdigest()


def fingerprint_files(files: Iterable[SourceFile], root: Path) -> dict[str, str]:
    """Path relative to ``root`` → fingerprint; files outside ``root`` go by their absolute path."""
    return {relative_name(file, root): fingerprint_file(file) for file in files}


def fingerprint_plan(plan: ConsolidationPlan, root: Path) -> str:
    """sha256 over where each output byte comes from and what is done to it, in hex.

    A reader or transform that was mended makes another plan of the same sources: without it, a model that an older
    ckptflow wrote would pass for the result.
    """
    names: dict[SourceFile, str] = {}

    def lines(source: TensorSource) -> Iterator[str]:
        yield f"{source.dtype}{source.shape}"
        for p in source.pieces:
            if p.file not in names:
                names[p.file] = relative_name(p.file, root)
            yield f"{names[p.file]} {p.offset_bytes}{p.strides}{p.offsets}{p.sizes}"

    digest = hashlib.sha256()
    for file in plan.files:
        digest.update(f"{file.name}\n".encode())
        for tensor in file.tensors:
            digest.update(f"{tensor.fqn} {tensor.dtype} {_scales(tensor.fold)}\n".encode())
            for source in tensor.sources:
                digest.update("\n".join(lines(source)).encode())
    return digest.hexdigest()


def _scales(fold: LoraFold | None) -> tuple[float, bool] | None:
    return None if fold is None else (fold.scale, fold.transposed)


def relative_name(file: SourceFile, root: Path) -> str:
    """The file's path as the record shows it."""
    path = Path(file.path)
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
