"""Torch files from before the zip format, and those saved with ``_use_new_zipfile_serialization=False``.

Five pickles one after the other (a magic number, the protocol version, facts about the machine, the object, the list
of storage keys), then per storage, in the order of that list, its number of elements as int64 and its bytes. The
element size is known only from the object's pickle, so that this is read twice: for the storages, then for good.
Source: torch/serialization.py, ``_legacy_save`` and ``_legacy_load``.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from dataclasses import dataclass
from typing import BinaryIO, Final

from ckptflow.errors import CorruptFileError, IncompleteCheckpointError, UnsafeFileError, UnsupportedCheckpointError
from ckptflow.torchfiles.dtypes import StorageType
from ckptflow.torchfiles.lazy import LazyStorage
from ckptflow.torchfiles.opcodes import MAX_PICKLE_BYTES, PickleEndsEarlyError, scan_pickle
from ckptflow.torchfiles.pickles import (
    load_pickle,
    load_with_stack,
    no_ints,
    no_persistent_load,
    torch_token,
    translated,
)
from ckptflow.torchfiles.storages import read_ints, storage_id
from ckptflow.torchfiles.stubs import Stub

MAGIC_NUMBER: Final = 0x1950A86A20F9469CFC6C
MAGIC_BYTES: Final = b"\x8a\x0a" + MAGIC_NUMBER.to_bytes(10, "little") + b"."
_PROTOCOL_VERSION: Final = 1001
_FIRST_READ_BYTES: Final = 2**16
_COUNT: Final = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class LegacyContent:
    """What a legacy file holds; the last two fields say where the object's pickle is, in bytes."""

    value: object
    foreign_globals: tuple[str, ...]
    storages: tuple[LazyStorage, ...]
    pickle_offset: int
    pickle_nbytes: int


def is_legacy_start(head: bytes) -> bool:
    """Whether a file that starts like this is a legacy torch file (``head``: 32 bytes or the whole file)."""
    return head[:1] == b"\x80" and MAGIC_BYTES in head[:32]


def read_legacy(file: BinaryIO, path: str, *, offset: int, length: int) -> LegacyContent:
    """Reads the structure of a legacy torch file.

    Raises:
        IncompleteCheckpointError: it ends early.
        CorruptFileError: it contradicts itself.
        UnsupportedCheckpointError: it was written on a big-endian machine.
        UnsafeFileError: as ``load_pickle``.
    """
    return _LegacyReader(file, path, offset, offset + length).read()


@dataclass(slots=True)
class _LegacyReader:
    file: BinaryIO
    path: str
    at: int
    end: int

    def read(self) -> LegacyContent:
        magic, version, machine = (self._plain() for _ in range(3))
        if magic != MAGIC_NUMBER or version != _PROTOCOL_VERSION or not isinstance(machine, dict):
            raise CorruptFileError("the file has the start of a torch file, but not its header", file=self.path)
        if machine.get("little_endian") is not True:
            raise UnsupportedCheckpointError("the file was saved on a big-endian machine", file=self.path)
        pickle_offset = self.at
        data = self._pickle()
        survey = self._survey(data)
        storages = self._places(self._plain(), survey)
        roots = _Storages(storages, self.path)
        value, foreign = load_pickle(
            data, self.path, roots.persistent_load, lambda tensor: read_ints(self.file, tensor)
        )
        return LegacyContent(value, foreign, tuple(roots.met.values()), pickle_offset, len(data))

    def _plain(self) -> object:
        return load_pickle(self._pickle(), self.path, no_persistent_load, no_ints)[0]

    def _pickle(self) -> bytes:
        """The bytes of the next pickle; moves behind it."""
        size = _FIRST_READ_BYTES
        while True:
            data = os.pread(self.file.fileno(), min(size, self.end - self.at), self.at)
            try:
                end = scan_pickle(data, self.path)
            except PickleEndsEarlyError:
                if len(data) < size:
                    raise self._truncated() from None
                if size >= MAX_PICKLE_BYTES:
                    raise UnsafeFileError("a pickle is absurdly large", file=self.path) from None
                size *= 4
                continue
            self.at += end
            return data[:end]

    def _survey(self, data: bytes) -> dict[str, _Root]:
        with translated(self.path):
            survey = _Survey(data, self.path)
            load_with_stack(survey, data, self.path)
        return survey.roots

    def _places(self, keys: object, survey: dict[str, _Root]) -> dict[str, LazyStorage]:
        """Walks over the storages behind the pickles."""
        if not isinstance(keys, list) or len(keys) != len(survey) or {str(key) for key in keys} != set(survey):
            raise CorruptFileError("the list of storages isn't that of the saved object", file=self.path)
        storages: dict[str, LazyStorage] = {}
        for key in map(str, keys):
            kind, device, numel = survey[key].kind, survey[key].device, survey[key].numel
            header = os.pread(self.file.fileno(), _COUNT.size, self.at)
            if self.at + _COUNT.size > self.end or len(header) < _COUNT.size:
                raise self._truncated()
            found = _COUNT.unpack(header)[0]
            if found != numel:
                raise CorruptFileError(
                    f"storage {key} has another size than its data", file=self.path, expected=numel, found=found
                )
            start, nbytes = self.at + _COUNT.size, numel * kind.itemsize
            if start + nbytes > self.end:
                raise self._truncated()
            storages[key] = LazyStorage(self.path, key, kind.dtype_name, device, start, nbytes, None)
            self.at = start + nbytes
        return storages

    def _truncated(self) -> IncompleteCheckpointError:
        return IncompleteCheckpointError(
            "the file is truncated or still being written",
            file=self.path,
            expected="a torch file in the old format",
            found=f"the end of the file at byte {self.end}",
            fix="wait until the save has finished, or copy the file again",
        )


@dataclass(frozen=True, slots=True)
class _Root:
    kind: StorageType
    device: str
    numel: int


class _Survey(pickle.Unpickler):
    """Reads only what the pickle says about storages."""

    def __init__(self, data: bytes, path: str) -> None:
        super().__init__(io.BufferedReader(io.BytesIO(data), 2**17), encoding="latin1")
        self._path = path
        self.roots: dict[str, _Root] = {}

    def find_class(self, module: str, name: str) -> object:
        return torch_token(module, name) or Stub

    def persistent_load(self, pid: object) -> object:
        kind, storage_type, key, device, numel, _ = storage_id(pid, 6)
        if kind == "module":
            return storage_type
        if not isinstance(storage_type, StorageType) or type(numel) is not int or numel < 0:
            raise pickle.UnpicklingError("the id of a storage is damaged")
        # A storage is read as it is first named; torch refuses to save one under two dtypes.
        self.roots.setdefault(_key(key), _Root(storage_type, str(device), numel))
        return Stub()


class _Storages:
    """Gives storages by persistent id, views on storages (torch before 0.4) included."""

    def __init__(self, roots: dict[str, LazyStorage], path: str) -> None:
        self._roots = roots
        self._path = path
        self.met: dict[str, LazyStorage] = {}

    def persistent_load(self, pid: object) -> object:
        kind, storage_type, key, _, numel, view = storage_id(pid, 6)
        if kind == "module":
            return storage_type
        root = self._roots[_key(key)]
        if not isinstance(storage_type, StorageType) or root.dtype_name != storage_type.dtype_name:
            raise CorruptFileError(f"storage {root.key} has two dtypes", file=self._path)
        if numel != root.nbytes // storage_type.itemsize:
            raise CorruptFileError(f"storage {root.key} has two sizes", file=self._path)
        self.met.setdefault(root.key, root)
        return root if view is None else self._view(root, storage_type.itemsize, view)

    def _view(self, root: LazyStorage, itemsize: int, view: object) -> LazyStorage:
        if not isinstance(view, tuple) or len(view) != 3:
            raise pickle.UnpicklingError("the id of a view on a storage is damaged")
        key, start, size = _key(view[0]), view[1], view[2]
        if type(start) is not int or type(size) is not int or not 0 <= start <= start + size <= root.nbytes // itemsize:
            raise CorruptFileError(f"view {key} reaches beyond storage {root.key}", file=self._path)
        known = self.met.get(key)
        if known is None:
            place = root.offset + start * itemsize
            known = LazyStorage(self._path, key, root.dtype_name, root.device, place, size * itemsize, None)
            self.met[key] = known
        return known


def _key(key: object) -> str:
    if not isinstance(key, str | int):
        raise pickle.UnpicklingError("the key of a storage is damaged")
    return str(key)
