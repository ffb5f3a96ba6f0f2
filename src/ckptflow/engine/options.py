"""How the engine may work: threads, memory, device. None of it changes a byte of the output."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ckptflow.errors import UsageError
from ckptflow.plan import PlannedTensor, WeightFile
from ckptflow.tensors import Piece

Device = Literal["auto", "cpu", "cuda"]

DISK_BLOCK_BYTES = 4096
"""Direct I/O needs offsets, lengths and addresses that are multiples of the disk's block."""

_USUAL_BLOCK_BYTES = 2 << 20
_SCATTERED_BLOCK_BYTES = 32 << 20
_LEAST_BLOCK_BYTES = 64 << 10
_USUAL_SCRATCH_BYTES = 1 << 20
_USEFUL_THREADS = 4
"""One sha256 stream takes about 2 GB/s of output, which three threads already feed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Resources and rules for writing weight files.

    Attributes:
        threads: threads that read, cast and write; None for as many as help.
        memory_budget_bytes: upper bound of the engine's buffers, in bytes. Adapter matrices come on top.
        device: where to cast; ``auto`` takes the CPU unless a GPU is there and helps (``engine.device`` has the rule).
        cast_bytes: bytes of all tensors that the whole job casts, as they are in the source, where this file is one of
            many: it tells ``auto`` whether starting a GPU is worth it. None: only this file counts.
        allow_nonfinite: write NaN and Inf instead of refusing them.
        durable: flush the file and its directory to the disk before the rename counts as done.
        direct_io: pass the page cache by where the file system allows it.
    """

    threads: int | None = None
    memory_budget_bytes: int = 512_000_000
    device: Device = "auto"
    cast_bytes: int | None = None
    allow_nonfinite: bool = False
    durable: bool = True
    direct_io: bool = True

    @property
    def thread_count(self) -> int:
        """As many as were asked for, or one more than CPUs, because one mostly waits for the disk."""
        return self.threads or min(len(os.sched_getaffinity(0)) + 1, _USEFUL_THREADS)

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise UsageError("the number of threads is below 1", found=self.threads)
        least = 4 * _LEAST_BLOCK_BYTES
        if self.memory_budget_bytes < least:
            raise UsageError(
                "the memory budget is too small", expected=f"at least {least} bytes", found=self.memory_budget_bytes
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """What a run allocates: ``ring`` blocks of ``block_bytes``, and scratch buffers of ``scratch_bytes`` per thread."""

    threads: int
    ring: int
    block_bytes: int
    scratch_bytes: int


def plan_buffers(options: EngineOptions, file: WeightFile, scratches: int = 1) -> Buffers:
    """Fit threads, ring and blocks into the memory budget, with ``scratches`` scratch buffers per thread.

    Two buffers more than threads: one that is hashed while another is still being written.
    """
    threads = options.thread_count
    wanted = _SCATTERED_BLOCK_BYTES if _is_scattered(file) else _USUAL_BLOCK_BYTES
    while wanted > _LEAST_BLOCK_BYTES and _total_bytes(threads, wanted, scratches) > options.memory_budget_bytes:
        wanted //= 2
    affordable = (options.memory_budget_bytes - _total_bytes(0, wanted, scratches)) // _thread_bytes(wanted, scratches)
    threads = max(1, min(threads, affordable))
    return Buffers(
        threads=threads, ring=threads + 2, block_bytes=wanted, scratch_bytes=min(wanted, _USUAL_SCRATCH_BYTES)
    )


def cast_bytes(tensors: Iterable[PlannedTensor]) -> int:
    """Bytes, as they are in the source, of the tensors that are cast and not folded: what a device can take over."""
    return sum(t.source.nbytes for t in tensors if t.fold is None and t.dtype != t.source.dtype)


def _total_bytes(threads: int, block_bytes: int, scratches: int) -> int:
    return 2 * block_bytes + threads * _thread_bytes(block_bytes, scratches)


def _thread_bytes(block_bytes: int, scratches: int) -> int:
    return block_bytes + scratches * min(block_bytes, _USUAL_SCRATCH_BYTES)


def _is_scattered(file: WeightFile) -> bool:
    """Whether large tensors lie in another element order than the output, so that blocks are made of short runs."""
    return any(
        _is_reordered(piece) and tensor.source.nbytes > 4 * _USUAL_BLOCK_BYTES
        for tensor in file.tensors
        for piece in tensor.source.pieces
    )


def _is_reordered(piece: Piece) -> bool:
    steps = [step for step, size in zip(piece.strides, piece.sizes, strict=True) if size > 1 and step > 0]
    return any(a < b for a, b in pairwise(steps))
