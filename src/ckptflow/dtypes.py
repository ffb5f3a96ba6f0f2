"""The element types that checkpoints hold, under torch's names and safetensors' codes.

Codes: https://github.com/huggingface/safetensors (``Dtype`` in safetensors/src/tensor.rs).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from ckptflow.errors import UnsupportedCheckpointError

if TYPE_CHECKING:
    import numpy as np

Kind = Literal["float", "int", "bool", "complex"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """One element type.

    Attributes:
        name: torch's name without the ``torch.`` prefix, such as ``bfloat16``.
        code: safetensors' code, such as ``BF16``; None where safetensors has none.
        itemsize: bytes per element.
        kind: what the bits mean; only ``float`` is ever cast.
    """

    name: str
    code: str | None
    itemsize: int
    kind: Kind

    def __str__(self) -> str:
        return self.name


def _table(*rows: tuple[str, str | None, int, Kind]) -> dict[str, DType]:
    return {name: DType(name=name, code=code, itemsize=size, kind=kind) for name, code, size, kind in rows}


DTYPES = _table(
    ("float64", "F64", 8, "float"),
    ("float32", "F32", 4, "float"),
    ("float16", "F16", 2, "float"),
    ("bfloat16", "BF16", 2, "float"),
    ("float8_e4m3fn", "F8_E4M3", 1, "float"),
    ("float8_e5m2", "F8_E5M2", 1, "float"),
    ("float8_e8m0fnu", "F8_E8M0", 1, "float"),
    ("int64", "I64", 8, "int"),
    ("int32", "I32", 4, "int"),
    ("int16", "I16", 2, "int"),
    ("int8", "I8", 1, "int"),
    ("uint64", "U64", 8, "int"),
    ("uint32", "U32", 4, "int"),
    ("uint16", "U16", 2, "int"),
    ("uint8", "U8", 1, "int"),
    ("bool", "BOOL", 1, "bool"),
    ("complex64", "C64", 8, "complex"),
    ("complex128", None, 16, "complex"),
)

BY_CODE = {dtype.code: dtype for dtype in DTYPES.values() if dtype.code is not None}


def dtype_named(name: str) -> DType:
    """The dtype of that torch name, with or without the ``torch.`` prefix.

    Raises:
        UnsupportedCheckpointError: the name is not in the table.
    """
    found = DTYPES.get(name.removeprefix("torch."))
    if found is None:
        raise UnsupportedCheckpointError("unknown tensor dtype", found=name, expected=", ".join(DTYPES))
    return found


@cache
def numpy_dtype(dtype: DType) -> np.dtype[np.generic]:
    """The numpy dtype with the same bits; bfloat16 and the float8 types come from ml_dtypes."""
    import ml_dtypes
    import numpy as np

    if hasattr(np, dtype.name) and dtype.name != "bool":
        return np.dtype(dtype.name)
    if dtype.name == "bool":
        return np.dtype(np.bool_)
    wanted: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, dtype.name))
    return wanted
