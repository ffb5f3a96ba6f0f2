"""The shrunk form of a torch file: what it holds, how large it is, and how its bytes are made."""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO, Final, Protocol

from ckptflow.shrink import ziplayout
from ckptflow.shrink.copying import Progress, Source, Span
from ckptflow.shrink.pieces import Piece
from ckptflow.torchfiles.lazy import LazyStorage
from ckptflow.torchfiles.reader import TorchFile
from ckptflow.torchfiles.zipfiles import ZipArchive

_MAX_ALIGNMENT_BYTES: Final = 2**16
_COUNT: Final = struct.Struct("<q")


class NewFile(Protocol):
    """A file to be written.

    Attributes:
        nbytes: its size.
    """

    @property
    def nbytes(self) -> int: ...

    def write(self, source: Source, target: BinaryIO, progress: Progress | None) -> dict[str, int]:
        """Writes all of it; gives the crc32 of each storage by its new key."""
        ...


@dataclass(frozen=True, slots=True)
class _Record:
    name: str
    content: bytes | Span

    @property
    def nbytes(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NewZip:
    """A torch zip; ``keys`` gives the storage's new key for the names of records that are storages."""

    records: tuple[_Record, ...]
    keys: dict[str, str]
    alignment: int

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return ziplayout.zip_nbytes(((record.name, record.nbytes) for record in self.records), self.alignment)

    def write(self, source: Source, target: BinaryIO, progress: Progress | None) -> dict[str, int]:
        """As ``NewFile``."""
        place, directory, crcs = 0, [], {}
        for record in self.records:
            header = ziplayout.local_header(place, record.name, record.nbytes, self.alignment)
            target.write(header)
            crc32 = _write(record.content, source, target, progress)
            tail = ziplayout.descriptor(place, record.nbytes, crc32)
            target.write(tail)
            directory.append(ziplayout.central_entry(place, record.name, record.nbytes, crc32))
            if record.name in self.keys:
                crcs[self.keys[record.name]] = crc32
            place += len(header) + record.nbytes + len(tail)
        entries = b"".join(directory)
        target.write(entries + ziplayout.end_records(len(directory), place, len(entries)))
        return crcs


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLegacyFile:
    """A legacy torch file: what precedes the storages, then each with its number of elements in front."""

    head: tuple[bytes | Span, ...]
    storages: tuple[tuple[str, int, Span], ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        head = sum(len(part) if isinstance(part, bytes) else part.nbytes for part in self.head)
        return head + sum(_COUNT.size + span.nbytes for _, _, span in self.storages)

    def write(self, source: Source, target: BinaryIO, progress: Progress | None) -> dict[str, int]:
        """As ``NewFile``."""
        for part in self.head:
            _write(part, source, target, progress)
        crcs = {}
        for key, numel, span in self.storages:
            target.write(_COUNT.pack(numel))
            crcs[key] = source.copy(span, target, progress)
        return crcs


def new_zip(file: TorchFile, archive: ZipArchive, pieces: Iterable[Piece], pickled: bytes) -> NewZip:
    """The shrunk zip: all records as they were and in their order, but for the storages and the pickle.

    Storages stand where the first one stood, in the order in which the pickle mentions them, as torch writes them
    (``torch.utils.serialization.config.load.calculate_storage_offsets`` counts on it).
    """
    prefix = next(iter(archive.records)).partition("/")[0] + "/"
    old = {f"{prefix}data/{storage.key}": storage for storage in file.storages}
    by_key = {storage.key: storage for storage in file.storages}
    new = [_Record(f"{prefix}data/{piece.new_key}", _span(by_key[piece.key], piece)) for piece in pieces]
    records: list[_Record] = []
    for name, record in archive.records.items():
        if name in old:
            records += new
            new = []
        elif name == f"{prefix}data.pkl":
            records.append(_Record(name, pickled))
        else:
            records.append(_Record(name, Span(record.offset, record.nbytes, record.crc32)))
    keys = {f"{prefix}data/{piece.new_key}": piece.new_key for piece in pieces}
    return NewZip(records=tuple(records), keys=keys, alignment=_alignment(archive, prefix))


def new_legacy_file(
    file: TorchFile, pieces: Iterable[Piece], pickled: bytes, itemsizes: dict[str, int]
) -> NewLegacyFile:
    """The shrunk legacy file; ``itemsizes`` gives bytes per element of each storage by its old key."""
    by_key = {storage.key: storage for storage in file.storages}
    ordered = sorted(pieces, key=lambda piece: (by_key[piece.key].offset, by_key[piece.key].nbytes, piece.start))
    behind_pickle = file.pickle_offset + file.pickle_nbytes
    first = min((storage.offset - _COUNT.size for storage in file.storages), default=file.length)
    keys: bytes | Span = Span(behind_pickle, first - behind_pickle)
    if any(piece.new_key != piece.key for piece in ordered):
        keys = pickle.dumps([piece.new_key for piece in ordered], protocol=2)
    storages = tuple(
        (piece.new_key, piece.nbytes // itemsizes[piece.key], _span(by_key[piece.key], piece)) for piece in ordered
    )
    return NewLegacyFile(head=(Span(0, file.pickle_offset), pickled, keys), storages=storages)


def _span(storage: LazyStorage, piece: Piece) -> Span:
    whole = piece.nbytes == storage.nbytes
    return Span(storage.offset + piece.start, piece.nbytes, storage.crc32 if whole else None)


def _write(content: bytes | Span, source: Source, target: BinaryIO, progress: Progress | None) -> int:
    if isinstance(content, Span):
        return source.copy(content, target, progress)
    target.write(content)
    return zlib.crc32(content)


def _alignment(archive: ZipArchive, prefix: str) -> int:
    """What the file says its storages are aligned to, in bytes."""
    record = archive.records.get(f"{prefix}.storage_alignment")
    text = archive.read(record.name) if record is not None and record.nbytes < 8 else b""
    found = int(text) if text.isdigit() else 0
    return found if 0 < found <= _MAX_ALIGNMENT_BYTES else ziplayout.DEFAULT_ALIGNMENT
