"""Parses MXNet's ``.params`` files: a list of arrays, then their names. Reads headers only, and seeks over the data.

Byte layout (little endian), from ``NDArray::Save``/``Load`` and ``LegacyLoad`` in MXNet's src/ndarray/ndarray.cc:

    u64 0x112, u64 0, u64 count, count arrays, u64 count of names (0 or the same), names as u64 length + bytes

    array: u32 magic: V3 (numpy shapes), V2, V1; anything else is the ndim of the oldest layout
      V2, V3: i32 storage type (0 dense, 1 row_sparse, 2 csr), sparse only: shape of the stored values
      shape: i32 ndim, i64 dims (oldest layout: u32 dims); an array without a shape ends here
      i32 device type, i32 device id, i32 dtype flag
      sparse only, one (row_sparse) or two (csr: indptr, then indices): i32 dtype flag, shape
      the stored values, then the one or two index arrays
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, Literal

from ckptflow.dtypes import DTYPES, DType
from ckptflow.errors import CorruptFileError, IncompleteCheckpointError, UnsafeFileError, UnsupportedCheckpointError
from ckptflow.tensors import Shape, SourceFile

LIST_MAGIC = struct.pack("<Q", 0x112)
# The u64 after the magic is always 0: eight zero bytes that every file holds.
ZERO_BYTES_OFFSET = 8
_V1, _V2, _V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_MAX_NDIM = 32
_MAX_ARRAYS = 1_000_000
_MAX_NAME_BYTES = 65_536

# TypeFlag in mshadow/base.h.
_DTYPE_FLAGS = {
    0: "float32",
    1: "float64",
    2: "float16",
    3: "uint8",
    4: "int32",
    5: "int8",
    6: "int64",
    7: "bool",
    8: "int16",
    9: "uint16",
    10: "uint32",
    11: "uint64",
    12: "bfloat16",
}

Storage = Literal["dense", "row_sparse", "csr"]
_STORAGE_TYPES: dict[int, Storage] = {0: "dense", 1: "row_sparse", 2: "csr"}
_INDEX_ARRAYS: dict[Storage, int] = {"dense": 0, "row_sparse": 1, "csr": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """A dense block of one dtype inside the file.

    Attributes:
        offset_bytes: where its first element is.
        shape: in elements.
        dtype: element type.
    """

    offset_bytes: int
    shape: Shape
    dtype: DType


@dataclass(frozen=True, slots=True, kw_only=True)
class NDArray:
    """One array of the list.

    Attributes:
        storage: how it is stored.
        shape: the shape that a person sees, in elements.
        values: what is stored of it.
        indices: row_sparse: the row numbers; csr: indptr, then the column numbers.
    """

    storage: Storage
    shape: Shape
    values: StoredArray
    indices: tuple[StoredArray, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamsFile:
    """A parsed file.

    Attributes:
        file: the file.
        arrays: None stands for an array that never got a shape and holds nothing.
        names: as many as arrays, or none at all.
    """

    file: SourceFile
    arrays: tuple[NDArray | None, ...]
    names: tuple[str, ...]


def parse_params(path: Path) -> ParamsFile:
    """Read the structure of a ``.params`` file; it must end exactly where the last name does.

    Raises:
        IncompleteCheckpointError: it is missing, or ends too early.
        CorruptFileError: it does not parse.
        UnsafeFileError: absurd counts.
        UnsupportedCheckpointError: an unknown dtype, storage type or file format, by name.
    """
    try:
        with open(path, "rb") as stream:
            stat = os.fstat(stream.fileno())
            file = SourceFile(str(path), stat.st_size, stat.st_mtime_ns)
            return _Parser(stream, file).parse()
    except FileNotFoundError as error:
        raise IncompleteCheckpointError("the file is missing", file=path) from error


@dataclass(slots=True)
class _Parser:
    stream: BinaryIO
    file: SourceFile

    def parse(self) -> ParamsFile:
        self._header()
        count = self._count("arrays", least_bytes=4)
        arrays = tuple(self._array() for _ in range(count))
        named = self._count("names", least_bytes=8)
        if named not in (0, count):
            raise self._corrupt("the number of names differs from the number of arrays", count, named)
        names = tuple(self._name() for _ in range(named))
        at = self.stream.tell()
        if at != self.file.nbytes:
            raise self._corrupt("the file does not end after its last name", f"{at} bytes", f"{self.file.nbytes} bytes")
        return ParamsFile(file=self.file, arrays=arrays, names=names)

    def _header(self) -> None:
        head = self._read(8)
        if head[:4] == b"PK\x03\x04":
            raise UnsupportedCheckpointError(
                "MXNet 2's numpy archives (.npz inside a .params file) are not supported",
                file=self.file.path,
                fix="save it with MXNet 1 or as an array list",
            )
        if head != LIST_MAGIC:
            raise self._corrupt("not an MXNet array list", LIST_MAGIC.hex(), head.hex())
        if self._read(8) != bytes(8):
            raise self._corrupt("the reserved field of the array list is not 0", 0, "another number")

    def _array(self) -> NDArray | None:
        magic = self._u32()
        if magic in (_V2, _V3):
            return self._array_v2(numpy_shapes=magic == _V3)
        shape = self._shape() if magic == _V1 else self._legacy_shape(magic)
        if not shape:
            return None
        dtype = self._device_and_dtype()
        return NDArray(storage="dense", shape=shape, values=self._block(shape, dtype), indices=())

    def _array_v2(self, *, numpy_shapes: bool) -> NDArray | None:
        flag = self._i32()
        storage = _STORAGE_TYPES.get(flag)
        if storage is None:
            raise UnsupportedCheckpointError("unknown MXNet storage type", file=self.file.path, found=flag)
        stored_shape = self._shape() if storage != "dense" else None
        shape = self._shape()
        # With numpy shapes () is a scalar and None is unknown; without them () is unknown.
        if shape is None or (not shape and not numpy_shapes):
            return None
        dtype = self._device_and_dtype()
        heads = [(self._dtype(self._i32()), self._shape() or ()) for _ in range(_INDEX_ARRAYS[storage])]
        values = self._block(shape if storage == "dense" else stored_shape or (), dtype)
        indices = tuple(self._block(dims, kind) for kind, dims in heads)
        return NDArray(storage=storage, shape=shape, values=values, indices=indices)

    def _block(self, shape: Shape, dtype: DType) -> StoredArray:
        offset, nbytes = self.stream.tell(), prod(shape) * dtype.itemsize
        if nbytes > self.file.nbytes - offset:
            raise self._truncated(f"an array of shape {list(shape)} ({nbytes} bytes at {offset})")
        self.stream.seek(nbytes, os.SEEK_CUR)
        return StoredArray(offset_bytes=offset, shape=shape, dtype=dtype)

    def _shape(self) -> Shape | None:
        """None where ndim or a dim is -1 (unknown)."""
        ndim = self._i32()
        if ndim == -1:
            return None
        self._check_ndim(ndim)
        dims: Shape = struct.unpack(f"<{ndim}q", self._read(8 * ndim))
        if any(dim < -1 for dim in dims):
            raise self._corrupt("a shape has negative dims", "0 or more", list(dims))
        return None if -1 in dims else dims

    def _legacy_shape(self, ndim: int) -> Shape:
        self._check_ndim(ndim)
        return struct.unpack(f"<{ndim}I", self._read(4 * ndim))

    def _check_ndim(self, ndim: int) -> None:
        if not 0 <= ndim <= _MAX_NDIM:
            at = self.stream.tell()
            raise self._corrupt(f"no array begins near byte {at}", f"at most {_MAX_NDIM} dims", f"{ndim} dims")

    def _device_and_dtype(self) -> DType:
        self._read(8)
        return self._dtype(self._i32())

    def _dtype(self, flag: int) -> DType:
        name = _DTYPE_FLAGS.get(flag)
        if name is None:
            raise UnsupportedCheckpointError("unknown MXNet dtype flag", file=self.file.path, found=flag)
        return DTYPES[name]

    def _name(self) -> str:
        size = self._u64()
        if size > _MAX_NAME_BYTES:
            raise UnsafeFileError("a name is absurdly long", file=self.file.path, found=f"{size} bytes")
        try:
            return self._read(size).decode()
        except UnicodeDecodeError as error:
            raise self._corrupt("a name is not UTF-8", "UTF-8", error.reason) from error

    def _count(self, what: str, least_bytes: int) -> int:
        count, left = self._u64(), self.file.nbytes - self.stream.tell()
        if count > _MAX_ARRAYS:
            raise UnsafeFileError(f"an absurd number of {what}", file=self.file.path, found=count)
        if count * least_bytes > left:
            raise self._truncated(f"{count} {what}")
        return count

    def _u64(self) -> int:
        return int.from_bytes(self._read(8), "little")

    def _u32(self) -> int:
        return int.from_bytes(self._read(4), "little")

    def _i32(self) -> int:
        return int.from_bytes(self._read(4), "little", signed=True)

    def _read(self, size: int) -> bytes:
        data = self.stream.read(size)
        if len(data) != size:
            raise self._truncated("more data")
        return data

    def _truncated(self, expected: str) -> IncompleteCheckpointError:
        return IncompleteCheckpointError(
            "the file is truncated or still being written",
            file=self.file.path,
            expected=expected,
            found=f"the end of the file at byte {self.file.nbytes}",
            fix="wait until the save has finished, or copy the file again",
        )

    def _corrupt(self, what: str, expected: object, found: object) -> CorruptFileError:
        return CorruptFileError(what, file=self.file.path, expected=expected, found=found)
