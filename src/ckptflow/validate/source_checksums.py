"""The source's own checksums: torch records a crc32 of each storage in its zip files, and checks it nowhere.

A byte that flips on disk or on the way there is copied faithfully by every reader of a checkpoint. Here the storages
that the output was made of are read whole and held against what torch wrote down when it saved them.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ckptflow.errors import CkptflowError
from ckptflow.formats.dcp_checks import DATA_SUFFIX, read_metadata
from ckptflow.manifest import CheckpointManifest
from ckptflow.plan import ConsolidationPlan
from ckptflow.tensors import TensorSource
from ckptflow.torchfiles.zipfiles import LOCAL_MAGIC, ZipRecord, read_zip_directory
from ckptflow.validate.report import Check, listing

NAME = "checksums in the source"
BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRecord:
    """One storage of one file."""

    path: str
    record: ZipRecord


def check_source_checksums(
    manifest: CheckpointManifest, plan: ConsolidationPlan, progress: Callable[[int], None], threads: int
) -> Check:
    """Every storage that a planned tensor lies in, against the crc32 that torch recorded.

    Args:
        manifest: the source.
        plan: what was written.
        progress: told the bytes that were read.
        threads: zlib lets them run at once.
    """
    try:
        used = list(_used(manifest, plan))
    except (CkptflowError, OSError) as error:
        return Check(name=NAME, status="failed", detail=f"the source can't be read again: {error}")
    recorded = [found for found in used if found.record.crc32 is not None]
    figures = {"storages": len(recorded), "bytes": sum(found.record.nbytes for found in recorded)}
    if not recorded:
        return Check(name=NAME, status="skipped", detail="the source's files record no checksums")
    with ThreadPoolExecutor(threads) as pool:
        sums = pool.map(lambda found: _crc32(found, progress), recorded)
        pairs = zip(recorded, sums, strict=True)
        damaged = [f"{found.record.name} in {found.path}" for found, crc in pairs if crc != found.record.crc32]
    if damaged:
        detail = f"bytes changed since torch saved them: {listing(damaged)}"
        return Check(name=NAME, status="failed", detail=detail, figures={**figures, "damaged": len(damaged)})
    return Check(name=NAME, status="passed", detail="as torch recorded them when it saved", figures=figures)


def _used(manifest: CheckpointManifest, plan: ConsolidationPlan) -> Iterator[StoredRecord]:
    ranges = _ranges(plan)
    for path, records in _records(manifest):
        records.sort(key=lambda record: record.offset)
        begins = [record.offset for record in records]
        chosen = {bisect_right(begins, offset) - 1 for offset in ranges.get(path, ())}
        for index in sorted(chosen):
            if index >= 0:
                yield StoredRecord(path=path, record=records[index])


def _ranges(plan: ConsolidationPlan) -> dict[str, set[int]]:
    """File → offsets at which pieces of planned tensors begin; a piece never leaves its storage."""
    offsets: dict[str, set[int]] = {}
    for tensor in plan.tensors:
        fold = tensor.fold
        sources: Sequence[TensorSource | None] = (tensor.source,)
        if fold is not None:
            sources = (tensor.source, fold.a, fold.b, fold.magnitude)
        for piece in (piece for source in sources if source is not None for piece in source.pieces):
            offsets.setdefault(piece.file.path, set()).add(piece.offset_bytes)
    return offsets


def _records(manifest: CheckpointManifest) -> Iterator[tuple[str, list[ZipRecord]]]:
    """Each torch file with its records; files of other kinds record no checksums and are left out."""
    entries = _dcp_entries(manifest)
    for file in manifest.files:
        with open(file.path, "rb") as stream:
            if stream.read(len(LOCAL_MAGIC)) != LOCAL_MAGIC:
                continue
            records: list[ZipRecord] = []
            for offset, nbytes in entries.get(file.path, [(0, file.nbytes)]):
                records += read_zip_directory(stream, file.path, offset=offset, length=nbytes).records.values()
            yield file.path, records


def _dcp_entries(manifest: CheckpointManifest) -> dict[str, list[tuple[int, int]]]:
    """A ``.distcp`` holds many torch files; ``.metadata`` tells where each lies, in bytes."""
    entries: dict[str, list[tuple[int, int]]] = {}
    if any(file.path.endswith(DATA_SUFFIX) for file in manifest.files):
        metadata = read_metadata(manifest.path, manifest.path)
        for record in (chunk.record for tensor in metadata.tensors.values() for chunk in tensor.chunks):
            path = str(Path(manifest.path) / record.file_name)
            entries.setdefault(path, []).append((record.offset_bytes, record.nbytes))
    return entries


def _crc32(found: StoredRecord, progress: Callable[[int], None]) -> int:
    crc, at, end = 0, found.record.offset, found.record.offset + found.record.nbytes
    descriptor = os.open(found.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while at < end:
            block = os.pread(descriptor, min(BLOCK_BYTES, end - at), at)
            if not block:
                break
            crc = zlib.crc32(block, crc)
            at += len(block)
            progress(len(block))
    finally:
        os.close(descriptor)
    return crc
