"""Cast on a device through torch: read into pinned memory, copy over, cast there, copy back.

Each thread has two slots, each with a pinned buffer to read into, device memory and a queue of its own. While the
device works on one slot, the thread reads into the other; the threads' queues overlap as well, so that copies to the
device, casts and copies back run side by side. A buffer is read into again, and a block is looked at, only after the
queue was waited for.

The device casts floats of four bytes and less, in runs that are worth the trip. All else is cast on the CPU, from the
same buffer. Other NaN payloads than numpy's don't matter: the engine overwrites every NaN that went
through a cast (``scan``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ckptflow.dtypes import DType
from ckptflow.engine.cast import Caster, CastKernel, cast_kernel
from ckptflow.engine.options import DISK_BLOCK_BYTES, Buffers

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

SOURCES = frozenset(("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"))
TARGETS = frozenset(("float32", "float16", "bfloat16"))

PINNED_PER_SCRATCH = 4
"""Two slots, each with a buffer to read into and one to copy back into."""

_GROWTH = 4
"""Device memory for results, in units of the buffer that is read into: float8 becomes float32."""

_LEAST_BYTES = 64 << 10
"""An estimate: numpy casts this much while two copies and a kernel are still being launched."""


class Queue(Protocol):
    """Runs work in the order in which it came."""

    def submit(self, work: Callable[[], None]) -> None:
        """Start it, or see to it that it starts; ``work`` itself must not wait."""

    def wait(self) -> None:
        """Until all that was submitted is done."""


class AtOnce:
    """The queue of a device that has none."""

    def submit(self, work: Callable[[], None]) -> None:
        """Do it."""
        work()

    def wait(self) -> None:
        """It is done."""


class TorchCasters:
    """All that the threads of one run cast with. Everything is allocated here, before the first byte is read.

    Use as a context manager: leaving it waits until the device touches none of the memory any more.
    """

    def __init__(
        self,
        device: torch.device,
        buffers: Buffers,
        queue: Callable[[], Queue] = AtOnce,
        *,
        least_bytes: int = _LEAST_BYTES,
    ) -> None:
        pinned = device.type != "cpu"
        self._lock = threading.Lock()
        self._all = [
            TorchCaster(device, buffers.scratch_bytes, queue, pinned=pinned, least_bytes=least_bytes)
            for _ in range(buffers.threads)
        ]
        self._blocks = [_page_memory(buffers.block_bytes, pinned=pinned) for _ in range(buffers.ring)]
        self._left = list(self._all)

    def __enter__(self) -> TorchCasters:
        return self

    def __exit__(self, *_: object) -> None:
        for caster in self._all:
            caster.wait()

    def page_buffer(self, nbytes: int) -> memoryview:
        """One block's memory, pinned, beginning at a page; zeros. There is one for each buffer of the ring."""
        with self._lock:
            return self._blocks.pop()[:nbytes]

    def any_caster(self) -> Caster:
        """One of them, to be used before the threads take theirs."""
        return self._all[0]

    def caster(self) -> Caster:
        """One that no other thread has."""
        with self._lock:
            return self._left.pop()


class TorchCaster:
    """One thread's caster on a device."""

    def __init__(
        self,
        device: torch.device,
        scratch_bytes: int,
        queue: Callable[[], Queue],
        *,
        pinned: bool,
        least_bytes: int,
    ) -> None:
        self.scratch_bytes = scratch_bytes
        self._least_bytes = least_bytes
        self._slots = [_Slot(device, scratch_bytes, queue(), pinned=pinned) for _ in range(2)]

    def buffer(self) -> memoryview:
        """The buffer of the slot that was not used last."""
        self._slots.reverse()
        self._slots[0].complete()
        return self._slots[0].buffer

    def kernel(self, source: DType, target: DType) -> CastKernel:
        """The device's, or numpy's for what it does not cast."""
        on_cpu = cast_kernel(source, target)
        if source == target or not is_cast_on_device(source, target):
            return on_cpu
        return partial(self._cast, source, target, on_cpu)

    def finish(self) -> None:
        """Wait for both slots."""
        for slot in reversed(self._slots):
            slot.complete()

    def wait(self) -> None:
        """Until the device has let go of all memory; results that were not asked for are dropped."""
        for slot in self._slots:
            slot.queue.wait()

    def _cast(self, source: DType, target: DType, on_cpu: CastKernel, to: NDArray[Any], values: NDArray[Any]) -> None:
        slot = self._slots[0]
        if values.nbytes >= self._least_bytes and slot.has_room_for(to):
            slot.cast(source, target, to, values)
        else:
            on_cpu(to, values)


class _Slot:
    """One buffer on its way: read into, copied to the device, cast, copied back."""

    def __init__(self, device: torch.device, nbytes: int, queue: Queue, *, pinned: bool) -> None:
        import torch

        self.queue = queue
        self._read = _host_memory(nbytes, pinned=pinned)
        self._back = _host_memory(nbytes, pinned=pinned)
        self._there = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._done = torch.empty(_GROWTH * nbytes, dtype=torch.uint8, device=device)
        self.buffer = _bytes_of(self._read)
        self._scattered: tuple[NDArray[Any], NDArray[Any]] | None = None

    def has_room_for(self, target: NDArray[Any]) -> bool:
        """Whether the results fit the memory that was set aside for them."""
        return target.nbytes <= (self._done if target.flags.c_contiguous else self._back).numel()

    def cast(self, source: DType, target: DType, to: NDArray[Any], values: NDArray[Any]) -> None:
        """Cast what lies in the buffer as ``values`` (any strides) into ``to``, which holds it after ``complete``."""
        steps = [step // source.itemsize for step in values.strides]
        span = source.itemsize * (1 + sum((n - 1) * s for n, s in zip(values.shape, steps, strict=True)))
        there, done = self._there[:span], self._done[: to.nbytes]
        typed = there.view(_torch_dtype(source)).as_strided(values.shape, steps)
        result = done.view(_torch_dtype(target)).view(to.shape)
        back = self._where_to(to)

        def work() -> None:
            there.copy_(self._read[:span], non_blocking=True)
            result.copy_(typed)
            back.copy_(done, non_blocking=True)

        self.queue.submit(work)

    def _where_to(self, to: NDArray[Any]) -> torch.Tensor:
        """The target itself where it is one run of memory; else the slot's buffer, from which ``complete`` takes it."""
        import torch

        if to.flags.c_contiguous:
            return torch.from_numpy(to.reshape(-1).view("u1"))
        back = self._back[: to.nbytes]
        bits = f"u{to.itemsize}"  # numpy copies these faster than ml_dtypes' floats
        self._scattered = (to.view(bits), back.numpy().view(bits).reshape(to.shape))
        return back

    def complete(self) -> None:
        """Wait for the device, and put the result where it belongs."""
        self.queue.wait()
        if self._scattered is not None:
            (to, result), self._scattered = self._scattered, None
            to[...] = result


def is_cast_on_device(source: DType, target: DType) -> bool:
    """Whether the device knows the pair; any other one is cast on the CPU."""
    import torch

    return source.name in SOURCES and target.name in TARGETS and hasattr(torch, source.name)


def _torch_dtype(dtype: DType) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, dtype.name)
    return found


def _host_memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)


def _page_memory(nbytes: int, *, pinned: bool) -> memoryview:
    """Zeros from the beginning of a page on. CUDA gives pages; should it not, a little more memory holds whole ones."""
    memory = _host_memory(nbytes, pinned=pinned)
    if memory.data_ptr() % DISK_BLOCK_BYTES:
        memory = _host_memory(nbytes + DISK_BLOCK_BYTES, pinned=pinned)
        begin = -memory.data_ptr() % DISK_BLOCK_BYTES
        memory = memory[begin : begin + nbytes]
    return _bytes_of(memory.zero_())


def _bytes_of(memory: torch.Tensor) -> memoryview:
    return memoryview(memory.numpy().data)
