"""Writes MXNet's array lists byte by byte, in every layout that its source documents."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FLAGS = {
    "float32": 0,
    "float64": 1,
    "float16": 2,
    "uint8": 3,
    "int32": 4,
    "int8": 5,
    "int64": 6,
    "bool": 7,
    "int16": 8,
    "uint16": 9,
    "uint32": 10,
    "uint64": 11,
    "bfloat16": 12,
}
V1, V2, V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
CPU = struct.pack("<ii", 1, 0)
Array = NDArray[np.generic]


def shape_bytes(shape: tuple[int, ...]) -> bytes:
    """A shape of 64-bit sizes."""
    return struct.pack(f"<i{len(shape)}q", len(shape), *shape)


def flag_bytes(array: Array) -> bytes:
    """MXNet's number of the dtype."""
    return struct.pack("<i", FLAGS[array.dtype.name])


def dense(array: Array, magic: int = V2) -> bytes:
    """A dense array under the magic number of one of the versions."""
    storage = b"" if magic == V1 else struct.pack("<i", 0)
    head = struct.pack("<I", magic) + storage + shape_bytes(array.shape)
    return head + CPU + flag_bytes(array) + array.tobytes()


def legacy(array: Array) -> bytes:
    """A dense array of the oldest layout, which has no magic number."""
    shape = struct.pack(f"<I{array.ndim}I", array.ndim, *array.shape)
    return shape + CPU + flag_bytes(array) + array.tobytes()


def sparse(storage: int, shape: tuple[int, ...], values: Array, *indices: Array) -> bytes:
    """A sparse array: ``storage`` 1 is rows, 2 is CSR."""
    head = struct.pack("<Ii", V2, storage) + shape_bytes(values.shape) + shape_bytes(shape) + CPU + flag_bytes(values)
    heads = b"".join(flag_bytes(index) + shape_bytes(index.shape) for index in indices)
    return head + heads + values.tobytes() + b"".join(index.tobytes() for index in indices)


def array_list(path: Path, arrays: dict[str, bytes], names: list[str] | None = None) -> Path:
    """The file; its names are those of the arrays unless others are given."""
    names = list(arrays) if names is None else names
    body = struct.pack("<QQQ", 0x112, 0, len(arrays)) + b"".join(arrays.values()) + struct.pack("<Q", len(names))
    path.write_bytes(body + b"".join(struct.pack("<Q", len(n.encode())) + n.encode() for n in names))
    return path
