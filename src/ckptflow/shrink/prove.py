"""Proves that a shrunk file says the same as the original: every value, every tensor, every byte.

The new file is read by the reader that all of ckptflow uses, which knows nothing of how it was made. Its object must
equal the old one; each tensor's window must lie at the place to which its bytes were moved; and each storage's bytes,
read back, must have the crc32 of the bytes that were copied.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable
from typing import BinaryIO, Final

from ckptflow.errors import VerificationError
from ckptflow.shrink.copying import Source, Span
from ckptflow.shrink.pieces import Piece
from ckptflow.torchfiles.lazy import LazyStorage, LazyTensor
from ckptflow.torchfiles.reader import TorchFile, open_torch_file
from ckptflow.torchfiles.stubs import Stub, stub_name

_PLAIN: Final = (str, bytes, int, bool, complex, type(None))


def check_same(old: TorchFile, new_path: str, pieces: Iterable[Piece], crcs: dict[str, int]) -> None:
    """Reads the new file and compares it with the old one.

    Raises:
        VerificationError: it says something else.
    """
    new = open_torch_file(new_path)
    moved = {piece.new_key: piece for piece in pieces}
    if {storage.key for storage in new.storages} != set(moved):
        raise _wrong(old.path, "its storages are others")
    _Comparison(old.path, moved).compare(old.value, new.value)
    with open(new_path, "rb") as file:
        _check_bytes(file, new, crcs)


def _check_bytes(file: BinaryIO, new: TorchFile, crcs: dict[str, int]) -> None:
    source = Source(file, new.path)
    for storage in new.storages:
        crc32 = source.copy(Span(storage.offset, storage.nbytes, storage.crc32), None)
        if crc32 != crcs[storage.key]:
            raise _wrong(new.path, f"storage {storage.key} has other bytes than were written")
    archive = new.read_archive()
    storages = {storage.offset for storage in new.storages if storage.nbytes}
    for record in archive.records.values() if archive is not None else ():
        if record.offset not in storages:
            source.copy(Span(record.offset, record.nbytes, record.crc32), None)


class _Comparison:
    """Walks over two objects at once, without recursion: each pair of containers once, so that cycles end.

    Pairs are known by their ids, so that only parts of the two objects may be walked over, nothing made on the way.
    """

    def __init__(self, path: str, moved: dict[str, Piece]) -> None:
        self._path = path
        self._moved = moved
        self._seen: set[tuple[int, int]] = set()
        self._waiting: list[tuple[object, object]] = []

    def compare(self, old: object, new: object) -> None:
        self._waiting.append((old, new))
        while self._waiting:
            self._pair(*self._waiting.pop())

    def _pair(self, old: object, new: object) -> None:
        if isinstance(old, type) or isinstance(new, type):
            self._require(stub_name(old) == stub_name(new), "a class")
        elif isinstance(old, _PLAIN):
            self._require(type(old) is type(new) and old == new, "a value")
        elif isinstance(old, float):
            same = isinstance(new, float) and struct.pack("<d", old) == struct.pack("<d", new)
            self._require(same, "a number")
        elif (id(old), id(new)) not in self._seen:
            self._seen.add((id(old), id(new)))
            self._containers(old, new)

    def _containers(self, old: object, new: object) -> None:
        self._require(stub_name(old) == stub_name(new), "a kind of object")
        if isinstance(old, LazyTensor) and isinstance(new, LazyTensor):
            self._tensors(old, new)
        elif isinstance(old, LazyStorage) and isinstance(new, LazyStorage):
            self._require(self._start(old, new) == 0 and old.nbytes == new.nbytes, "a storage")
        elif isinstance(old, dict) and isinstance(new, dict):
            self._all(old.keys(), new.keys())
            self._all(old.values(), new.values())
            self._all([vars(old)] if hasattr(old, "__dict__") else [], [vars(new)] if hasattr(new, "__dict__") else [])
        elif isinstance(old, list | tuple) and isinstance(new, list | tuple):
            self._all(old, new)
        elif isinstance(old, set | frozenset) and isinstance(new, set | frozenset):
            self._sets(old, new)
        elif isinstance(old, Stub) and isinstance(new, Stub):
            self._all(_parts(old), _parts(new))
        elif dataclasses.is_dataclass(old) and dataclasses.is_dataclass(new):
            names = [field.name for field in dataclasses.fields(old)]
            self._all([getattr(old, name) for name in names], [getattr(new, name) for name in names])
        else:
            self._require(type(old) is type(new) and (old == new or repr(old) == repr(new)), "a value")

    def _all(self, old: Iterable[object], new: Iterable[object]) -> None:
        left, right = list(old), list(new)
        self._require(len(left) == len(right), "the length of a container")
        self._waiting.extend(zip(left, right, strict=True))

    def _sets(self, old: Iterable[object], new: Iterable[object]) -> None:
        # Only plain members have an order that both can be put in.
        left, right = list(old), list(new)
        plain = [{(type(item), item) for item in items if isinstance(item, _PLAIN)} for items in (left, right)]
        self._require(len(left) == len(right) and plain[0] == plain[1], "a set")

    def _tensors(self, old: LazyTensor, new: LazyTensor) -> None:
        for name in ("dtype_name", "shape", "strides", "requires_grad", "conj", "neg", "is_parameter", "subclass"):
            self._require(getattr(old, name) == getattr(new, name), f"the {name} of a tensor")
        start = self._start(old.storage, new.storage)
        if old.numel:
            place = new.storage_offset * new.itemsize + start
            self._require(place == old.storage_offset * old.itemsize, "the bytes of a tensor")

    def _start(self, old: LazyStorage, new: LazyStorage) -> int:
        """Where the new storage's bytes began in the old one."""
        piece = self._moved[new.key]
        self._require(
            piece.key == old.key
            and piece.nbytes == new.nbytes
            and (old.dtype_name, old.device) == (new.dtype_name, new.device),
            "the storage of a tensor",
        )
        return piece.start

    def _require(self, same: bool, what: str) -> None:
        if not same:
            raise _wrong(self._path, f"{what} differs")


def _parts(stub: Stub) -> list[object]:
    return [stub.args, stub.kwargs, stub.state, stub.items, stub.mapping]


def _wrong(path: str, found: str) -> VerificationError:
    return VerificationError(
        "the shrunk file isn't the same as the original, which was left as it is",
        file=path,
        expected="the same tensors and values",
        found=found,
        fix="report this as a fault of ckptflow",
    )
