"""Finite check and statistics from the bits of what is written, by integer maxima: exact and without temporaries.

IEEE floats of one sign order like their bits. With the bits read as unsigned, the largest is the most negative value
(sign bit set) or, without negatives, the largest; read as signed, the largest is the largest positive value. All NaN
and Inf have the exponent's bits set, so they are above a fixed limit in either reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptflow.dtypes import DType, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FIRST_NONFINITE = {
    "float64": 0x7FF0_0000_0000_0000,
    "float32": 0x7F80_0000,
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float8_e5m2": 0x7C,
    "float8_e4m3fn": 0x7F,
}


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Statistics of some elements.

    Attributes:
        minimum: smallest finite value, None without one.
        maximum: largest finite value, None without one.
        nonfinite: number of NaN and Inf.
        first_nonfinite: index of the first of them, None without one.
    """

    minimum: float | int | None = None
    maximum: float | int | None = None
    nonfinite: int = 0
    first_nonfinite: int | None = None

    @property
    def all_zero(self) -> bool:
        """Whether there are elements and all are zero, of either sign."""
        return self.minimum == 0 and self.maximum == 0 and self.nonfinite == 0

    def joined(self, other: ValueRange) -> ValueRange:
        """Statistics of both; ``first_nonfinite`` keeps this one's."""
        if self.minimum is None or self.maximum is None:
            low, high = other.minimum, other.maximum
        elif other.minimum is None or other.maximum is None:
            low, high = self.minimum, self.maximum
        else:
            low, high = min(self.minimum, other.minimum), max(self.maximum, other.maximum)
        return ValueRange(low, high, self.nonfinite + other.nonfinite, self.first_nonfinite)


def scan(values: NDArray[Any], dtype: DType, *, canonical_nan: bool) -> ValueRange:
    """Statistics of a flat array of ``dtype``, not empty.

    Args:
        values: the elements.
        dtype: their dtype.
        canonical_nan: overwrite every NaN with the positive quiet NaN, so that bytes don't depend on the CPU's cast.
    """
    limit = _FIRST_NONFINITE.get(dtype.name)
    if limit is None:
        return _scan_plainly(values, dtype, canonical_nan=canonical_nan)
    size = dtype.itemsize
    sign = 1 << (8 * size - 1)
    signed, unsigned = values.view(f"i{size}"), values.view(f"u{size}")
    top, most = int(signed.max()), int(unsigned.max())
    if top >= limit or most >= sign | limit:
        return _scan_plainly(values, dtype, canonical_nan=canonical_nan)
    high = top if top >= 0 else int(unsigned.min())
    low = most if most >= sign else int(unsigned.min())
    return ValueRange(_value(low, dtype), _value(high, dtype))


def _value(bits: int, dtype: DType) -> float:
    import numpy as np

    return float(np.array([bits], f"u{dtype.itemsize}").view(numpy_dtype(dtype))[0])


def _scan_plainly(values: NDArray[Any], dtype: DType, *, canonical_nan: bool) -> ValueRange:
    """The slow way: integers, complex, odd floats, and floats that are known to hold NaN or Inf."""
    import numpy as np

    if dtype.kind in ("int", "bool"):
        low, high = values.min(), values.max()
        return ValueRange(int(low), int(high))
    with np.errstate(all="ignore"):  # signalling NaN
        finite = np.isfinite(values)
        count = int(values.size - np.count_nonzero(finite))
        first = int(np.argmin(finite)) if count else None
        if canonical_nan and count:
            values[np.isnan(values)] = np.nan
    kept = values[finite] if count else values
    if kept.size == 0 or dtype.kind == "complex":
        return ValueRange(nonfinite=count, first_nonfinite=first)
    return ValueRange(float(kept.min()), float(kept.max()), count, first)
