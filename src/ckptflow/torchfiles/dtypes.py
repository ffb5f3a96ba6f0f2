"""Torch's dtype and storage type names, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NoReturn

# Element sizes in bytes, by torch's own names; from c10/core/ScalarType.h.
ITEMSIZE: Final[dict[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "qint32": 4,
    "qint8": 1,
    "quint8": 1,
    "quint4x2": 1,
    "quint2x4": 1,
}

# Other names under which `torch.<name>` gives the same dtype.
DTYPE_ALIASES: Final[dict[str, str]] = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "cdouble": "complex128",
    "cfloat": "complex64",
    "chalf": "complex32",
}

# Storage class name -> dtype; None means bytes without a type (their numel counts bytes).
STORAGE_DTYPES: Final[dict[str, str | None]] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "QInt32Storage": "qint32",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": None,
}


@dataclass(frozen=True, slots=True)
class TorchDtype:
    """A ``torch.dtype`` in a pickle, by torch's name."""

    name: str

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError("a dtype can't be changed")

    def __reduce__(self) -> tuple[object, ...]:
        return (TorchDtype, (self.name,))


@dataclass(frozen=True, slots=True)
class StorageType:
    """A torch storage class in a pickle; ``dtype_name`` is None for one without a type."""

    dtype_name: str | None

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError("a storage type can't be changed")

    @property
    def itemsize(self) -> int:
        """Bytes per element as the pickle counts them."""
        return 1 if self.dtype_name is None else ITEMSIZE[self.dtype_name]
