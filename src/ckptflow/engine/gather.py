"""Read windows of files into arrays, cast on the way, through one small buffer.

The buffer keeps memory bounded whatever the tensor's size, and stays in the CPU's cache between read and cast.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from ckptflow.dtypes import DType, numpy_dtype
from ckptflow.engine.cast import Caster, CastKernel, NumpyCaster
from ckptflow.engine.sources import SourceFiles
from ckptflow.engine.windows import PieceIndex, Window
from ckptflow.tensors import Shape, SourceFile, TensorSource, contiguous_strides

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BRIDGED_GAP_BYTES = 32 << 10
"""Reading on over a gap of this size costs about as much as another system call from Python (4 microseconds)."""


class Gatherer:
    """Fills arrays with ranges of tensors. One per thread.

    Attributes:
        read_bytes: bytes read so far, bridged gaps included.
    """

    def __init__(
        self, files: SourceFiles, scratch_bytes: int, stop: threading.Event, caster: Caster | None = None
    ) -> None:
        """Without a ``caster``, casts are numpy's, through ``scratch_bytes`` of memory."""
        self._files = files
        self._caster = caster or NumpyCaster(scratch_bytes)
        self._stop = stop
        self.read_bytes = 0

    def fill(self, out: NDArray[Any], source: TensorSource, index: PieceIndex, start: int, target: DType) -> None:
        """Fill ``out`` (flat, contiguous, of dtype ``target``) with the elements from ``start`` on.

        Raises:
            SourceChangedError: a file ends too early or is not the one that was described.
            CancelledError: the stop event was set.
        """
        kernel = self._caster.kernel(source.dtype, target)
        for window in index.windows(start, start + out.size):
            box = out[window.start : window.start + prod(window.box)]
            if window.sizes != window.box or not _is_contiguous(window):
                part = box.reshape(window.box)[_box_slices(window.corner, window.sizes)]
                self._read_window(window, source.dtype, part, kernel)
            elif source.dtype == target:
                self._read(window.piece.file, window.offset_bytes, box.view("u1").data)
            else:
                self._read_run(window, source.dtype, box, kernel)
        self._caster.finish()

    def _read(self, file: SourceFile, offset_bytes: int, target: memoryview) -> None:
        if self._stop.is_set():
            raise CancelledError
        self._files.read_into(file, offset_bytes, target)
        self.read_bytes += len(target)

    def _read_run(self, window: Window, dtype: DType, out: NDArray[Any], kernel: CastKernel) -> None:
        """Read a window without gaps."""
        import numpy as np

        element, room = numpy_dtype(dtype), self._caster.scratch_bytes // dtype.itemsize
        for begin in range(0, out.size, room):
            part = out[begin : begin + room]
            data = self._caster.buffer()[: part.size * dtype.itemsize]
            self._read(window.piece.file, window.offset_bytes + begin * dtype.itemsize, data)
            kernel(part, np.frombuffer(data, element))

    def _read_window(self, window: Window, dtype: DType, out: NDArray[Any], kernel: CastKernel) -> None:
        """Read the window in as few calls as fit the buffer, dims with the largest stride outermost."""
        import numpy as np

        itemsize, element = dtype.itemsize, numpy_dtype(dtype)
        dims = sorted(range(len(window.sizes)), key=lambda d: -window.strides[d])
        out = out.transpose(dims)
        sizes, strides = tuple(window.sizes[d] for d in dims), tuple(window.strides[d] for d in dims)
        unit = _plan_reads(sizes, strides, itemsize, self._caster.scratch_bytes)
        outer = [range(0, size, step) for size, step in zip(sizes, unit, strict=True)]
        for corner in product(*outer):
            part = tuple(min(n, size - c) for c, n, size in zip(corner, unit, sizes, strict=True))
            offset = window.offset_bytes + itemsize * sum(c * s for c, s in zip(corner, strides, strict=True))
            span = 1 + sum((n - 1) * s for n, s in zip(part, strides, strict=True))
            scratch = self._caster.buffer()
            self._read(window.piece.file, offset, scratch[: span * itemsize])
            steps = tuple(s * itemsize for s in strides)
            view: NDArray[Any] = np.ndarray(part, element, scratch, 0, steps)
            kernel(out[_box_slices(corner, part)], view)


def _plan_reads(sizes: Shape, strides: Shape, itemsize: int, scratch_bytes: int) -> Shape:
    """Extent of one read in each dim: inner dims whole while their span fits and gaps are worth bridging."""
    unit = [1] * len(sizes)
    span, room = 1, scratch_bytes // itemsize
    for d in reversed(range(len(sizes))):
        if sizes[d] == 1:
            continue
        if (strides[d] - span) * itemsize > _BRIDGED_GAP_BYTES:
            break
        unit[d] = sizes[d] if strides[d] == 0 else min(sizes[d], (room - span) // strides[d] + 1)
        span += (unit[d] - 1) * strides[d]
        if unit[d] < sizes[d]:
            break
    return tuple(unit)


def _box_slices(corner: Sequence[int], sizes: Sequence[int]) -> tuple[Any, ...]:
    """An index that gives a view, also of a box without dims."""
    return (*(slice(c, c + n) for c, n in zip(corner, sizes, strict=True)), ...)


def _is_contiguous(window: Window) -> bool:
    steps = contiguous_strides(window.sizes)
    return all(a == b or n == 1 for a, b, n in zip(window.strides, steps, window.sizes, strict=True))
