"""A weight file whose bytes go on in order while they are produced, and never lie in a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from ckptflow.engine.blocks import Part
from ckptflow.engine.checksums import NOTHING_RECORDED, PassingChecksums, Recorded
from ckptflow.engine.device import open_casters
from ckptflow.engine.digest import FileDigest
from ckptflow.engine.execute import Cancel
from ckptflow.engine.options import EngineOptions
from ckptflow.engine.pipeline import Pipeline, check_cancel
from ckptflow.engine.record import WeightFileRecord
from ckptflow.engine.scan import ValueRange
from ckptflow.engine.sources import SourceFiles
from ckptflow.output.safetensors import weight_file_header
from ckptflow.plan import WeightFile


class InOrder(Protocol):
    """What takes the bytes of a weight file from the first to the last."""

    def append(self, data: memoryview | bytes) -> None:
        """Take the next bytes; the memory is used again after the call, so that they have to be copied."""


class _Nowhere:
    """For the pipeline's threads: what they fill goes on by way of the digest, once its values were looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, data: memoryview, offset_bytes: int) -> None:
        """Nothing."""


class _PassingDigest(FileDigest):
    """Hashes the blocks in order, as for a file, and passes each on."""

    def __init__(self, file: WeightFile, header: bytes, stream: InOrder) -> None:
        super().__init__(file, header)
        self._stream = stream
        stream.append(header)

    def add(self, block: memoryview, parts: Sequence[Part], ranges: Sequence[ValueRange]) -> None:
        super().add(block, parts, ranges)
        self._stream.append(block)


def weight_file_bytes(file: WeightFile) -> int:
    """Size of a weight file, header included."""
    return len(weight_file_header(file)) + file.data_bytes


def stream_weight_file(
    file: WeightFile,
    stream: InOrder,
    options: EngineOptions | None = None,
    progress: Callable[[int], None] | None = None,
    cancel: Cancel | None = None,
    recorded: Recorded = NOTHING_RECORDED,
) -> WeightFileRecord:
    """Give the bytes that ``write_weight_file`` would write to ``stream``, in order, in this thread.

    A stream that waits holds the engine back. Values are passed on only after they were found fit.

    Args:
        file: what to produce; every source must tile its shape (``check_tiling``).
        stream: takes the bytes.
        options: resources and rules.
        progress: called with the number of bytes of tensor data passed on since the last call.
        cancel: looked at a few times a second.
        recorded: checksums of the sources, which what is read is compared with.

    Returns:
        What was passed on, with checksums and statistics.

    Raises:
        ValueRefusedError: a tensor holds NaN or Inf, or the cast makes one, and ``allow_nonfinite`` is off.
        SourceChangedError: a source is short, gone, or not as its metadata described it.
        CorruptFileError: a source is not what its recorded checksum says; its bytes may have been passed on.
        OutputError: the work was cancelled.
        UsageError: the plan asks for something that is not a cast, or an adapter doesn't fit.
        DeviceError: the device that was asked for is missing, full, or failed.
    """
    begin = time.perf_counter()
    options = options or EngineOptions()
    header = weight_file_header(file)
    digest = _PassingDigest(file, header, stream)
    out = _Nowhere(Path(file.name))
    passing = PassingChecksums(recorded, file.tensors)
    with (
        open_casters(options, file, partial(check_cancel, cancel, out.path)) as (casters, buffers),
        SourceFiles(passing) as sources,
    ):
        pipeline = Pipeline(file, sources, out, len(header), options, buffers, casters)
        read_bytes = pipeline.run(digest, progress, cancel)
        sources.check_unchanged()
    nbytes = len(header) + file.data_bytes
    return WeightFileRecord(
        name=file.name,
        nbytes=nbytes,
        sha256=digest.sha256(),
        tensors=digest.tensors(),
        seconds=time.perf_counter() - begin,
        read_bytes=read_bytes,
        written_bytes=nbytes,
        compared=passing.compared(),
    )
