"""Write one weight file in one streaming pass: read, cast, check, write, hash.

Threads fill blocks and write them; the calling thread takes the blocks in order and hashes them. A ring of buffers
bounds the memory and holds the readers back when the disk or the hash is behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from ckptflow.engine.checksums import NOTHING_RECORDED, PassingChecksums, Recorded
from ckptflow.engine.device import open_casters
from ckptflow.engine.digest import FileDigest
from ckptflow.engine.options import EngineOptions
from ckptflow.engine.pipeline import Pipeline, check_cancel
from ckptflow.engine.record import WeightFileRecord
from ckptflow.engine.sources import SourceFiles
from ckptflow.engine.writer import NewFile, padded, page_buffer
from ckptflow.output.safetensors import weight_file_header
from ckptflow.plan import WeightFile


class Cancel(Protocol):
    """Whatever can say that the work should stop, such as ``threading.Event``."""

    def is_set(self) -> bool:
        """Whether to stop."""
        ...


def write_weight_file(
    file: WeightFile,
    path: Path,
    options: EngineOptions | None = None,
    progress: Callable[[int], None] | None = None,
    cancel: Cancel | None = None,
    recorded: Recorded = NOTHING_RECORDED,
) -> WeightFileRecord:
    """Write a weight file to ``path``. Its bytes depend on ``file`` alone, not on the options.

    Args:
        file: what to write; every source must tile its shape (``check_tiling``).
        path: final name; the directory must exist. Until the file is whole it is called ``.<name>.part``.
        options: resources and rules.
        progress: called in this thread with the number of bytes of tensor data written since the last call.
        cancel: looked at a few times a second.
        recorded: checksums of the sources, which what is read is compared with.

    Returns:
        What was written, with checksums and statistics.

    Raises:
        ValueRefusedError: a tensor holds NaN or Inf, or the cast makes one, and ``allow_nonfinite`` is off.
        SourceChangedError: a source is short, gone, or not as its metadata described it.
        CorruptFileError: a source is not what its recorded checksum says.
        OutputError: the file can't be written, such as a full disk, or the work was cancelled.
        UsageError: the plan asks for something that is not a cast, or an adapter doesn't fit.
        DeviceError: the device that was asked for is missing, full, or failed.

    After any exception there is neither a new file at ``path`` nor a part file.
    """
    begin = time.perf_counter()
    options = options or EngineOptions()
    header = weight_file_header(file)
    nbytes = len(header) + file.data_bytes
    digest = FileDigest(file, header)
    passing = PassingChecksums(recorded, file.tensors)
    with (
        open_casters(options, file, partial(check_cancel, cancel, path)) as (casters, buffers),
        SourceFiles(passing) as sources,
        NewFile(path, nbytes, direct_io=options.direct_io, durable=options.durable) as out,
    ):
        out.write(page_buffer(len(header), header), 0)
        pipeline = Pipeline(file, sources, out, len(header), options, buffers, casters)
        read_bytes = pipeline.run(digest, progress, cancel)
        sources.check_unchanged()
        out.commit()
    return WeightFileRecord(
        name=file.name,
        nbytes=nbytes,
        sha256=digest.sha256(),
        tensors=digest.tensors(),
        seconds=time.perf_counter() - begin,
        read_bytes=read_bytes,
        written_bytes=padded(nbytes),
        compared=passing.compared(),
    )
