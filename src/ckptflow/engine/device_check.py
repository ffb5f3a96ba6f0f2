"""Prove that a device casts as the CPU does, before it casts a checkpoint's values.

A device, a driver or a release of torch may round, flush or saturate in its own way. Every bit pattern of the small
types, and of float32 all patterns of the upper half with what matters below (zero, ones, ties of both targets and
their neighbours), go through the very buffers and queues that the run will use. It takes milliseconds, and is done
once a process for each device and pair of dtypes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ckptflow.dtypes import DType, numpy_dtype
from ckptflow.engine.cast import Caster, cast_kernel
from ckptflow.engine.compare import first_differing
from ckptflow.engine.torch_cast import is_cast_on_device
from ckptflow.errors import DeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LOWER_HALVES = (0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
"""Ties: bfloat16 drops 16 bits, float16 drops 13 (more where it is subnormal, which the upper halves cover)."""

_proven: set[tuple[str, str, str]] = set()
_lock = threading.Lock()


def check_device(caster: Caster, device: str, pairs: Iterable[tuple[DType, DType]]) -> None:
    """Cast the probes of every pair that the device casts, and compare with numpy.

    Args:
        caster: of the device; must not be in use.
        device: its name, which stands for the same device as long as the process lives.
        pairs: source and target dtypes.

    Raises:
        DeviceError: a value differs in its bits; NaN may be any NaN.
    """
    for source, target in pairs:
        if source == target or not is_cast_on_device(source, target):
            continue
        with _lock:
            if (device, source.name, target.name) in _proven:
                continue
        _check_pair(caster, device, source, target)
        with _lock:
            _proven.add((device, source.name, target.name))


def probes(dtype: DType) -> NDArray[Any]:
    """Values of a dtype that show how it is cast."""
    import numpy as np

    if dtype.itemsize <= 2:
        patterns = np.arange(1 << (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}")
        return np.tile(patterns, (1 << 16) // patterns.size).view(numpy_dtype(dtype))  # enough to be worth the trip
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    bits = upper[:, None] | np.array(_LOWER_HALVES, np.uint32)
    return bits.reshape(-1).view(numpy_dtype(dtype))


def _check_pair(caster: Caster, device: str, source: DType, target: DType) -> None:
    import numpy as np

    values = probes(source)
    expected = np.empty(values.size, numpy_dtype(target))
    cast_kernel(source, target)(expected, values)
    found = (~expected.view(f"u{target.itemsize}")).view(expected.dtype)  # what is not written is wrong
    room, kernel = caster.scratch_bytes // source.itemsize, caster.kernel(source, target)
    for begin in range(0, values.size, room):
        part = values[begin : begin + room]
        data = caster.buffer()[: part.nbytes]
        data[:] = part.view("u1").data
        kernel(found[begin : begin + part.size], np.frombuffer(data, values.dtype))
    caster.finish()
    at = first_differing(expected, found, cast=True)
    if at is not None:
        raise DeviceError(
            f"a device does not cast {source} to {target} as the CPU does",
            expected=f"{expected[at]} for {values[at]}",
            found=f"{found[at]} on {device}",
            fix="use --device cpu",
        )
