"""The CUDA devices of this machine: which there are, which are idle, their queues, and their failures in words.

Importing this module does not import torch, nor does ``idle_gpus``; all else does.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckptflow.engine.options import Buffers
from ckptflow.engine.torch_cast import TorchCasters
from ckptflow.errors import DeviceError

if TYPE_CHECKING:
    import torch

_ON_CPU = "use --device cpu: the bytes are the same"


_IDLE_BYTES = 2 * 10**9
"""An idle GPU holds what the driver needs and, for each process that ever used it, a context."""

_MIB = 1 << 20
_SMI = ("nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits")
_SMI_TIMEOUT_SECONDS = 20.0
"""It hangs where a GPU is broken."""


def idle_gpus() -> set[str]:
    """UUIDs of GPUs that nobody computes on: at most 2 GB of their memory are in use. Leaves the GPUs untouched.

    The memory of a training run may be full to the last bytes: a context, which torch would need to ask the same
    question, could already end it. Without ``nvidia-smi``, or where that does not know, no GPU counts as idle.
    """
    try:
        output = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_TIMEOUT_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return set()
    rows = [line.partition(",")[::2] for line in output.splitlines()]
    return {_plain(uuid) for uuid, used in rows if used.strip().isdigit() and int(used) * _MIB <= _IDLE_BYTES}


def visible_gpus() -> list[str]:
    """UUIDs of the GPUs in torch's order: they stand for the same GPU in every process.

    Raises:
        DeviceError: torch is not installed, was built without CUDA, or sees no GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise DeviceError(
            "casting on a GPU needs torch", found=str(error), fix=f"install torch built for CUDA, or {_ON_CPU}"
        ) from error
    with explained():
        if not torch.cuda.is_available():
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
            raise DeviceError(
                "there is no CUDA device",
                found=f"torch {torch.__version__}, {built}, sees none",
                fix=f"check `nvidia-smi`, CUDA_VISIBLE_DEVICES and which torch is installed, or {_ON_CPU}",
            )
        return [_uuid(number) for number in range(torch.cuda.device_count())]


def _uuid(number: int) -> str:
    import torch

    properties = torch.cuda.get_device_properties(number)
    return _plain(str(properties.uuid))


def _plain(uuid: str) -> str:
    """The tools differ in the prefix."""
    return uuid.strip().removeprefix("GPU-").lower()


@contextmanager
def cuda_casters(number: int, buffers: Buffers) -> Iterator[TorchCasters]:
    """Casters on a GPU, which is the thread's current one inside the block.

    Args:
        number: torch's number of the GPU.
        buffers: how many, and how large.

    Raises:
        DeviceError: the GPU's memory is full, or CUDA failed.
    """
    import torch

    device = torch.device("cuda", number)
    with torch.cuda.device(device):  # without it, pinned memory would take a context on the first GPU as well
        with explained():
            casters = TorchCasters(device, buffers, lambda: CudaQueue(device))
        with casters:
            yield casters


class CudaQueue:
    """A stream of its own."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Blocking: a thread that waits leaves its core to the others, which is what the GPU is there for.
        self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def submit(self, work: Callable[[], None]) -> None:
        """Put the copies and kernels that ``work`` launches on the stream."""
        import torch

        # The device too: on its way back from another device, ``stream`` alone would make a context on the first one.
        with explained(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()
            self._done.record(self._stream)

    def wait(self) -> None:
        """Until the stream has done all."""
        with explained():
            self._done.synchronize()


@contextmanager
def explained() -> Iterator[None]:
    """torch's errors about a device, as ours.

    Raises:
        DeviceError: instead of what torch raised.
    """
    try:
        yield
    except RuntimeError as error:
        import torch

        full = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
        raise DeviceError(
            "the GPU's memory is full" if full else "the GPU failed",
            found=str(error).splitlines()[0],
            fix=f"wait until other programs have left it, or {_ON_CPU}" if full else _ON_CPU,
        ) from error
