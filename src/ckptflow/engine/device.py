"""Where a weight file is cast: on the CPU, or on a GPU that is there, free, and worth it.

The rule of ``--device auto``, cheapest test first. It takes a GPU where

1. the job casts at least 32 GB: an estimate, not measured on a GPU. If starting torch and CUDA takes four seconds of
   a core, and a thread casts 5 GB/s, less than 20 GB can't win;
2. the kernel shows an NVIDIA device, CUDA_VISIBLE_DEVICES does not hide it, and torch is installed (not imported yet);
3. nobody computes on it: ``nvidia-smi`` says that at most 2 GB of its memory are in use, so that no training run is
   put in danger;
4. torch sees it;
5. no other process holds its slot (``engine.slots``): ``auto`` doesn't wait, as the CPU is there;
6. it casts probes to the same bits as the CPU (``engine.device_check``).

``cuda`` asks for 4 and 6 and waits for 5. Both leave files with adapters to fold, and files without anything to cast,
to the CPU. Validation is always on the CPU: it proves the GPU's work by another way.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ckptflow.engine.cuda import cuda_casters, idle_gpus, visible_gpus
from ckptflow.engine.device_check import check_device
from ckptflow.engine.options import Buffers, EngineOptions, cast_bytes, plan_buffers
from ckptflow.engine.pipeline import Casters, NumpyCasters
from ckptflow.engine.slots import free_gpu
from ckptflow.engine.torch_cast import PINNED_PER_SCRATCH
from ckptflow.errors import DeviceError
from ckptflow.plan import WeightFile

AUTO_LEAST_CAST_BYTES = 32 * 10**9

_log = logging.getLogger(__name__)


@contextmanager
def open_casters(
    options: EngineOptions, file: WeightFile, check_cancel: Callable[[], None]
) -> Iterator[tuple[Casters, Buffers]]:
    """What to cast a weight file with, and buffers that fit it. A GPU is held until the block is left.

    Args:
        options: device and memory.
        file: what will be written.
        check_cancel: called while a GPU is waited for; raises where the work was cancelled.

    Raises:
        DeviceError: ``cuda`` was asked for, and there is no GPU that can be used.
    """
    with ExitStack() as stack:
        casters = _open_gpu(options, file, check_cancel, stack)
        if casters is None:
            buffers = plan_buffers(options, file)
            casters = NumpyCasters(buffers.scratch_bytes), buffers
        yield casters


def _open_gpu(
    options: EngineOptions, file: WeightFile, check_cancel: Callable[[], None], stack: ExitStack
) -> tuple[Casters, Buffers] | None:
    if options.device == "cpu":
        return None
    if options.device == "cuda":
        gpus = visible_gpus()
        if not has_work_for_device(file):
            _log.info("%s: nothing in it is cast by itself; the GPU is not needed", file.name)
            return None
        return _hold_gpu(list(enumerate(gpus)), options, file, stack, _Waiting(file.name, check_cancel))
    if not auto_considers_gpu(options, file):
        return None
    try:
        idle = idle_gpus()
        free = [(n, uuid) for n, uuid in enumerate(visible_gpus() if idle else ()) if uuid in idle]
        found = _hold_gpu(free, options, file, stack, None)
    except DeviceError as error:
        _log.info("%s: cast on the CPU, since %s (%s)", file.name, error.what, error.found)
        return None
    if found is None:
        _log.info("%s: cast on the CPU, since other processes use the GPUs", file.name)
    return found


def _hold_gpu(
    gpus: Sequence[tuple[int, str]],
    options: EngineOptions,
    file: WeightFile,
    stack: ExitStack,
    on_wait: Callable[[], None] | None,
) -> tuple[Casters, Buffers] | None:
    """Take a slot, allocate, prove; what was taken is given back when ``stack`` is left, or here on a failure."""
    with ExitStack() as taken:
        position = taken.enter_context(free_gpu([uuid for _, uuid in gpus], on_wait))
        if position is None:
            return None
        number, uuid = gpus[position]
        buffers = plan_buffers(options, file, PINNED_PER_SCRATCH)
        casters = taken.enter_context(cuda_casters(number, buffers))
        check_device(casters.any_caster(), uuid, {(t.source.dtype, t.dtype) for t in file.tensors})
        _log.info("%s: cast on GPU %s", file.name, uuid)
        stack.push(taken.pop_all())
        return casters, buffers


def has_work_for_device(file: WeightFile) -> bool:
    """Whether a device can take something over: casts, and no adapter, whose sums are the CPU's."""
    return cast_bytes(file.tensors) > 0 and all(tensor.fold is None for tensor in file.tensors)


def auto_considers_gpu(options: EngineOptions, file: WeightFile, dev: Path = Path("/dev")) -> bool:
    """Whether ``auto`` goes so far as to import torch."""
    job_bytes = cast_bytes(file.tensors) if options.cast_bytes is None else options.cast_bytes
    return (
        job_bytes >= AUTO_LEAST_CAST_BYTES
        and has_work_for_device(file)
        and os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1", "NoDevFiles")
        and any((*dev.glob("nvidia[0-9]*"), *dev.glob("dxg")))  # the second under WSL
        and importlib.util.find_spec("torch") is not None
    )


class _Waiting:
    """Says once that a GPU is waited for."""

    def __init__(self, name: str, check_cancel: Callable[[], None]) -> None:
        self._name = name
        self._check_cancel = check_cancel
        self._said = False

    def __call__(self) -> None:
        self._check_cancel()
        if not self._said:
            self._said = True
            _log.warning("%s: waits for a GPU; other processes hold all of them", self._name)
