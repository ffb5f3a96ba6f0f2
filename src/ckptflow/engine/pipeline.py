"""The threads and the ring of buffers behind ``write_weight_file``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

from ckptflow.dtypes import numpy_dtype
from ckptflow.engine.blocks import BlockPlan, Part
from ckptflow.engine.cast import Caster, NumpyCaster
from ckptflow.engine.fold import FoldedTensors
from ckptflow.engine.gather import Gatherer
from ckptflow.engine.options import Buffers, EngineOptions
from ckptflow.engine.refusal import refuse_nonfinite
from ckptflow.engine.scan import ValueRange, scan
from ckptflow.engine.sources import SourceFiles
from ckptflow.engine.windows import PieceIndex
from ckptflow.engine.writer import padded, page_buffer
from ckptflow.errors import OutputError
from ckptflow.plan import WeightFile

if TYPE_CHECKING:
    from ckptflow.engine.digest import FileDigest

_CANCEL_POLL_SECONDS = 0.1


class _Cancel(Protocol):
    def is_set(self) -> bool: ...


class Out(Protocol):
    """Where filled blocks go: a new file, or nowhere, where they go on by way of the digest.

    Attributes:
        path: the weight file, for messages.
    """

    path: Path

    def write(self, data: memoryview, offset_bytes: int) -> None:
        """Take whole disk blocks; called by several threads, in any order."""


def check_cancel(cancel: _Cancel | None, path: Path) -> None:
    """Raise if the work on the file at ``path`` should stop.

    Raises:
        OutputError: ``cancel`` is set.
    """
    if cancel is not None and cancel.is_set():
        raise OutputError("writing a weight file was cancelled", file=path)


class Casters(Protocol):
    """Where blocks are cast."""

    def page_buffer(self, nbytes: int) -> memoryview:
        """Memory for a block, beginning at a page."""

    def caster(self) -> Caster:
        """What one more thread casts with."""


class NumpyCasters:
    """On the CPU."""

    def __init__(self, scratch_bytes: int) -> None:
        self._scratch_bytes = scratch_bytes

    def page_buffer(self, nbytes: int) -> memoryview:
        """Plain memory."""
        return page_buffer(nbytes)

    def caster(self) -> Caster:
        """numpy's."""
        return NumpyCaster(self._scratch_bytes)


class _Buffer:
    """One block of the ring; free again when it is both written and hashed."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.users = 0


@dataclass(frozen=True, slots=True)
class _Filled:
    block: int
    buffer: _Buffer
    parts: list[Part]
    ranges: list[ValueRange]


class Pipeline:
    """Fills, writes and hashes the blocks of one weight file. Good for one run."""

    def __init__(
        self,
        file: WeightFile,
        sources: SourceFiles,
        out: Out,
        data_begin: int,
        options: EngineOptions,
        buffers: Buffers,
        casters: Casters | None = None,
    ) -> None:
        """Without ``casters``, all is cast on the CPU."""
        self._file = file
        self._sources = sources
        self._out = out
        self._data_begin = data_begin
        self._options = options
        self._buffers = buffers
        self._casters = casters or NumpyCasters(buffers.scratch_bytes)
        self._blocks = BlockPlan(file, buffers.block_bytes)
        self._folds = FoldedTensors()
        self._index = lru_cache(maxsize=4 * buffers.threads)(self._make_index)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._next_block = 0
        self._free: SimpleQueue[_Buffer | None] = SimpleQueue()
        self._events: SimpleQueue[_Filled | Future[int]] = SimpleQueue()

    def run(self, digest: FileDigest, progress: Callable[[int], None] | None, cancel: _Cancel | None) -> int:
        """Do it all; feeds ``digest`` in block order in this thread.

        Returns:
            Bytes read from the sources.
        """
        for _ in range(min(self._buffers.ring, self._blocks.count)):
            self._free.put(_Buffer(self._casters.page_buffer(padded(self._buffers.block_bytes))))
        threads = min(self._buffers.threads, self._blocks.count)
        if threads == 0:
            return 0
        with ThreadPoolExecutor(threads, thread_name_prefix="ckptflow-engine") as pool:
            workers = [pool.submit(self._work) for _ in range(threads)]
            try:
                for worker in workers:
                    worker.add_done_callback(self._report_failure)
                self._consume(digest, progress, cancel)
                return sum(worker.result() for worker in workers)
            finally:
                self._stop.set()
                for _ in workers:
                    self._free.put(None)

    def _consume(self, digest: FileDigest, progress: Callable[[int], None] | None, cancel: _Cancel | None) -> None:
        waiting: dict[int, _Filled] = {}
        for block in range(self._blocks.count):
            while block not in waiting:
                filled = self._next_event(cancel)
                waiting[filled.block] = filled
            filled = waiting.pop(block)
            if not self._options.allow_nonfinite:
                self._check_finite(filled)
            nbytes = self._blocks.block_bytes(block)
            digest.add(filled.buffer.memory[:nbytes], filled.parts, filled.ranges)
            self._release(filled.buffer)
            if progress is not None:
                progress(nbytes)

    def _next_event(self, cancel: _Cancel | None) -> _Filled:
        while True:
            check_cancel(cancel, self._out.path)
            try:
                event = self._events.get(timeout=_CANCEL_POLL_SECONDS)
            except Empty:
                continue
            if isinstance(event, _Filled):
                return event
            event.result()  # a failed worker: raises what it raised

    def _check_finite(self, filled: _Filled) -> None:
        for part, values in zip(filled.parts, filled.ranges, strict=True):
            if values.first_nonfinite is not None:
                gatherer = Gatherer(self._sources, self._buffers.scratch_bytes, threading.Event())
                index = part.start + values.first_nonfinite
                refuse_nonfinite(self._file.tensors[part.number], self._index(part.number), index, gatherer)

    def _report_failure(self, worker: Future[int]) -> None:
        if worker.exception() is not None:
            self._events.put(worker)

    def _work(self) -> int:
        """Take buffers and blocks until none is left. A buffer first: so the oldest taken block always has one."""
        gatherer = Gatherer(self._sources, self._buffers.scratch_bytes, self._stop, self._casters.caster())
        while (buffer := self._free.get()) is not None and not self._stop.is_set():
            block = self._take_block()
            if block is None:
                self._free.put(buffer)  # wakes the next worker, which then ends too
                break
            parts = self._blocks.parts(block)
            buffer.users = 2
            ranges = [self._fill_part(buffer, part, gatherer) for part in parts]
            nbytes = self._blocks.block_bytes(block)
            whole = padded(nbytes)
            buffer.memory[nbytes:whole] = bytes(whole - nbytes)
            self._events.put(_Filled(block, buffer, parts, ranges))
            self._out.write(buffer.memory[:whole], self._data_begin + block * self._buffers.block_bytes)
            self._release(buffer)
        return gatherer.read_bytes

    def _fill_part(self, buffer: _Buffer, part: Part, gatherer: Gatherer) -> ValueRange:
        import numpy as np

        tensor = self._file.tensors[part.number]
        index = self._index(part.number)
        out = np.frombuffer(buffer.memory, numpy_dtype(tensor.dtype), part.stop - part.start, part.at)
        if tensor.fold is not None:
            self._folds.get(part.number, tensor, index, gatherer).fill(out, part.start, gatherer)
        else:
            gatherer.fill(out, tensor.source, index, part.start, tensor.dtype)
        changed = tensor.fold is not None or tensor.dtype != tensor.source.dtype
        return scan(out, tensor.dtype, canonical_nan=changed)

    def _make_index(self, number: int) -> PieceIndex:
        return PieceIndex(self._file.tensors[number].source)

    def _take_block(self) -> int | None:
        with self._lock:
            if self._next_block >= self._blocks.count:
                return None
            self._next_block += 1
            return self._next_block - 1

    def _release(self, buffer: _Buffer) -> None:
        with self._lock:
            buffer.users -= 1
            free = buffer.users == 0
        if free:
            self._free.put(buffer)
