"""Storages of one file while its pickle is read."""

from __future__ import annotations

import os
import pickle
from typing import BinaryIO, Final

from ckptflow.errors import CorruptFileError
from ckptflow.torchfiles.dtypes import StorageType
from ckptflow.torchfiles.lazy import LazyStorage, LazyTensor
from ckptflow.torchfiles.zipfiles import ZipArchive

_INT_BYTES: Final = {"int64": 8, "int32": 4, "int16": 2}
_MAX_INTS: Final = 2**20


class ZipStorages:
    """Gives the storages of a zip by persistent id, one object per key."""

    def __init__(self, archive: ZipArchive, prefix: str) -> None:
        self._archive = archive
        self._prefix = prefix
        self.by_key: dict[str, LazyStorage] = {}

    def persistent_load(self, pid: object) -> object:
        """``('storage', type, key, location, numel)`` → storage; ``('module', class, …)`` → class."""
        kind, storage_type, key, location, numel = storage_id(pid, 5)
        if kind == "module":
            return storage_type
        if not isinstance(storage_type, StorageType) or not isinstance(key, str) or type(numel) is not int:
            raise pickle.UnpicklingError("the id of a storage is damaged")
        storage = self.by_key.get(key)
        if storage is None:
            storage = self.by_key[key] = self._new(storage_type, key, str(location), numel)
        elif storage.dtype_name != storage_type.dtype_name:
            raise self._corrupt(
                f"storage {key} has two dtypes", expected=storage.dtype_name, found=storage_type.dtype_name
            )
        return storage

    def _new(self, storage_type: StorageType, key: str, device: str, numel: int) -> LazyStorage:
        record = self._archive.records.get(f"{self._prefix}data/{key}")
        if record is None:
            raise self._corrupt("the record of a storage is missing in the zip", expected=f"data/{key}")
        # A storage of bytes seen through a wider dtype may end within an element.
        if numel < 0 or numel != record.nbytes // storage_type.itemsize:
            raise self._corrupt(
                f"storage {key} has another size than its record",
                expected=f"{numel} elements of {storage_type.itemsize} bytes",
                found=f"{record.nbytes} bytes",
            )
        return LazyStorage(
            self._archive.path, key, storage_type.dtype_name, device, record.offset, record.nbytes, record.crc32
        )

    def _corrupt(self, what: str, *, expected: object = None, found: object = None) -> CorruptFileError:
        return CorruptFileError(what, file=self._archive.path, expected=expected, found=found)


def storage_id(pid: object, length: int) -> tuple[object, ...]:
    """Splits a persistent id of torch; ``module`` ids, which are shorter, are padded."""
    if not isinstance(pid, tuple) or not pid or pid[0] not in ("storage", "module"):
        raise pickle.UnpicklingError("a persistent id isn't one of torch's")
    if pid[0] == "module":
        return (*pid[:2], *(None,) * (length - len(pid[:2])))
    if len(pid) != length:
        raise pickle.UnpicklingError("the id of a storage is damaged")
    return pid


def read_ints(file: BinaryIO, tensor: LazyTensor) -> tuple[int, ...]:
    """Values of a small integer tensor (the ranks of a device mesh), row-major.

    Raises:
        CorruptFileError: too large, of another dtype, or cut off.
    """
    width = _INT_BYTES.get(tensor.dtype_name)
    if width is None or max(tensor.numel, tensor.extent_bytes // tensor.itemsize) > _MAX_INTS:
        raise CorruptFileError(
            "a device mesh isn't a small integer tensor",
            file=tensor.storage.path,
            found=f"{tensor.dtype_name} of shape {tensor.shape}",
        )
    if tensor.numel == 0:
        return ()
    data = os.pread(file.fileno(), tensor.extent_bytes, tensor.byte_offset)
    if len(data) != tensor.extent_bytes:
        raise CorruptFileError("the ranks of a device mesh are cut off", file=tensor.storage.path)
    places = [0]
    for size, stride in zip(tensor.shape, tensor.strides, strict=True):
        places = [place + index * stride for place in places for index in range(size)]
    ends = (place * width for place in places)
    return tuple(int.from_bytes(data[end : end + width], "little", signed=True) for end in ends)
