"""The source's own checksums: torch records a crc32 of each storage in its zip files, and checks it nowhere.

A byte that flips on disk or on the way there is copied faithfully by every reader of a checkpoint. Here the storages
that the output was made of are read whole and held against what torch wrote down when it saved them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, groupby
from operator import itemgetter

from ckptflow.errors import CkptflowError
from ckptflow.formats.recorded_checksums import RecordedChecksums
from ckptflow.manifest import CheckpointManifest
from ckptflow.plan import ConsolidationPlan
from ckptflow.torchfiles.checksums import Stored, crc32
from ckptflow.validate.report import Check, listing

NAME = "checksums in the source"
BLOCK_BYTES = 4 << 20
BATCH_BYTES = 64 << 20
"""What one task reads at least, where a file has so much."""


def check_source_checksums(
    manifest: CheckpointManifest, plan: ConsolidationPlan, progress: Callable[[int], None], threads: int
) -> Check:
    """Every storage that a planned tensor lies in, against the crc32 that torch recorded.

    Args:
        manifest: the source.
        plan: what was written.
        progress: told the bytes that were read.
        threads: they run at once.
    """
    try:
        used = list(_used(manifest, plan))
    except (CkptflowError, OSError) as error:
        return Check(name=NAME, status="failed", detail=f"the source can't be read again: {error}")
    figures = {"storages": len(used), "bytes": sum(stored.end - stored.begin for _, stored in used)}
    if not used:
        return Check(name=NAME, status="skipped", detail="the source's files record no checksums")
    with ThreadPoolExecutor(threads) as pool:
        sums = chain.from_iterable(pool.map(lambda batch: _crc32s(batch[0], batch[1], progress), _batches(used)))
        damaged = [
            f"{stored.end - stored.begin} bytes at {stored.begin} of {path}"
            for (path, stored), crc in zip(used, sums, strict=True)
            if crc != stored.crc32
        ]
    if damaged:
        detail = f"bytes changed since torch saved them: {listing(damaged)}"
        return Check(name=NAME, status="failed", detail=detail, figures={**figures, "damaged": len(damaged)})
    return Check(name=NAME, status="passed", detail="as torch recorded them when it saved", figures=figures)


def _used(manifest: CheckpointManifest, plan: ConsolidationPlan) -> Iterator[tuple[str, Stored]]:
    """Path and place of each storage that a piece of a planned tensor begins in; a piece never leaves its storage."""
    offsets: dict[str, set[int]] = {}
    for piece in (p for tensor in plan.tensors for source in tensor.sources for p in source.pieces):
        offsets.setdefault(piece.file.path, set()).add(piece.offset_bytes)
    recorded = RecordedChecksums()
    for file in manifest.files:
        table = recorded.of(file)
        found = {stored for at in offsets.get(file.path, ()) for stored in table.meeting(at, at + 1)}
        yield from ((file.path, stored) for stored in sorted(found))


def _batches(used: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, list[Stored]]]:
    """Path and storages of one file that are worth a task of their own, in the same order."""
    for path, group in groupby(used, key=itemgetter(0)):
        batch: list[Stored] = []
        for _, stored in group:
            batch.append(stored)
            if stored.end - batch[0].begin >= BATCH_BYTES:
                yield path, batch
                batch = []
        if batch:
            yield path, batch


def _crc32s(path: str, batch: Sequence[Stored], progress: Callable[[int], None]) -> list[int]:
    """Of each storage; those that lie side by side are read together."""
    sums: list[int] = []
    block, begin = memoryview(b""), 0
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for stored in batch:
            crc, at = 0, stored.begin
            while at < stored.end:
                if not begin <= at < begin + len(block):
                    begin = at
                    block = memoryview(os.pread(descriptor, min(BLOCK_BYTES, batch[-1].end - at), at))
                    if not block:
                        break  # cut off; the sum tells
                part = block[at - begin : stored.end - begin]
                crc = crc32(part, crc)
                at += len(part)
                progress(len(part))
            sums.append(crc)
    finally:
        os.close(descriptor)
    return sums
