"""Casting kernels: round to nearest, ties to even, bit for bit ``torch.Tensor.to`` (NaN payloads aside).

torch casts float64 to the 16-bit types by way of float32 (``c10::Half(float)``, ``c10::BFloat16(float)``), so the
double rounding is part of the contract. float8 is a source only: writing it needs scales, not a cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ckptflow.dtypes import DType
from ckptflow.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

CastKernel = Callable[["NDArray[Any]", "NDArray[Any]"], None]
"""``kernel(target, source)`` writes the source's values into the target array of the same shape."""


class Caster(Protocol):
    """What one thread casts with: the buffer that it reads into, and the kernels that take values out of it.

    Attributes:
        scratch_bytes: size of the buffer.
    """

    scratch_bytes: int

    def buffer(self) -> memoryview:
        """The buffer for the next read; what was in it before is cast, or lies in another one."""

    def kernel(self, source: DType, target: DType) -> CastKernel:
        """The kernel for a pair of dtypes. Its source is a view on the last ``buffer``, from the first byte on.

        The target's values are there after ``finish``, not before.

        Raises:
            UsageError: the pair is not a cast.
        """

    def finish(self) -> None:
        """Wait until every target holds its values."""


class NumpyCaster:
    """Casts on the CPU, at once."""

    def __init__(self, scratch_bytes: int) -> None:
        self.scratch_bytes = scratch_bytes
        self._scratch = memoryview(bytearray(scratch_bytes))

    def buffer(self) -> memoryview:
        """Always the same."""
        return self._scratch

    def kernel(self, source: DType, target: DType) -> CastKernel:
        """numpy's."""
        return cast_kernel(source, target)

    def finish(self) -> None:
        """Nothing to wait for."""


def cast_kernel(source: DType, target: DType) -> CastKernel:
    """The kernel for a pair of dtypes.

    Raises:
        UsageError: one of them is not a float, or the target is a float of one byte.
    """
    if source == target:
        return copy_values
    if source.kind != "float" or target.kind != "float" or target.itemsize < 2:
        raise UsageError(
            "only floats are cast, and only to floats of two bytes or more", expected=source.name, found=target.name
        )
    if source.itemsize == 8 and target.itemsize < 4:
        return _cast_by_float32
    return _cast


def copy_values(target: NDArray[Any], source: NDArray[Any]) -> None:
    """The same bits."""
    target[...] = source


def _cast(target: NDArray[Any], source: NDArray[Any]) -> None:
    import numpy as np

    with np.errstate(all="ignore"):  # overflow is found by the finite check, with the tensor's name
        target[...] = source


def _cast_by_float32(target: NDArray[Any], source: NDArray[Any]) -> None:
    import numpy as np

    with np.errstate(all="ignore"):
        target[...] = source.astype(np.float32)
