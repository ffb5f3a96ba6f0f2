"""Reads the directory of the zip files that torch writes, bounded against hostile ones.

torch stores each storage as an uncompressed record whose data starts at a multiple of 64 bytes (padding in the local
header's extra field), with zip64 fields where 32 bits don't do. Layout: APPNOTE.TXT 6.3.10, sections 4.3 and 4.5.3.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from typing import BinaryIO, Final

from ckptflow.errors import CheckpointError, CorruptFileError, IncompleteCheckpointError, UnsafeFileError

LOCAL_MAGIC: Final = b"PK\x03\x04"
_END_MAGIC: Final = b"PK\x05\x06"
_END: Final = struct.Struct("<4s4H2LH")
_END64_LOCATOR: Final = struct.Struct("<4sLQL")
_END64: Final = struct.Struct("<4sQ2H2L4Q")
_CENTRAL: Final = struct.Struct("<4s6H3L5H2L")
_LOCAL_BYTES: Final = 30
_LOCAL_TAIL: Final = struct.Struct("<4sHHH16xHH")
_MAX_COMMENT_BYTES: Final = 65_535
_MAX_DIRECTORY_BYTES: Final = 2**30
_ENCRYPTED: Final = 0x1
# Behind a record's data there may be a descriptor (APPNOTE 4.3.9), longer where sizes or places need 64 bits.
_MAX32: Final = 2**32 - 1
_GAPS: Final[tuple[int, ...]] = (0, 16)
_GAPS64: Final[tuple[int, ...]] = (0, 16, 24)
# Local headers within this many bytes of each other are fetched by one read.
_BATCH_BYTES: Final = 2**16


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """A stored record.

    Attributes:
        name: as in the archive, such as ``archive/data/0``.
        offset: where its bytes start in the file.
        nbytes: its length.
        crc32: None where the file doesn't record it (torch can be told to leave it 0).
    """

    name: str
    offset: int
    nbytes: int
    crc32: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipArchive:
    """The directory of one zip, possibly inside a larger file.

    Attributes:
        path: the file.
        offset: where the zip starts in it, in bytes.
        length: its length.
        records: name to record, in the order of the directory.
    """

    path: str
    offset: int
    length: int
    records: dict[str, ZipRecord]

    def read(self, name: str) -> bytes:
        """The bytes of a record, checked against its crc32 where there is one.

        Raises:
            CorruptFileError: no such record, short, or another checksum.
        """
        record = self.records.get(name)
        if record is None:
            raise CorruptFileError("a record is missing in the zip", file=self.path, expected=name)
        with open(self.path, "rb") as file:
            return read_record(file, record, self.path)


def read_record(file: BinaryIO, record: ZipRecord, path: str) -> bytes:
    """As ``ZipArchive.read``, from a file that is open already."""
    data = os.pread(file.fileno(), record.nbytes, record.offset)
    while len(data) < record.nbytes:
        # One call reads at most 2 GiB on Linux.
        more = os.pread(file.fileno(), record.nbytes - len(data), record.offset + len(data))
        if not more:
            raise CorruptFileError(f"record {record.name} ends early", file=path)
        data += more
    if record.crc32 is not None and zlib.crc32(data) != record.crc32:
        raise CorruptFileError(f"record {record.name} is damaged: its checksum differs", file=path)
    return data


def read_zip_directory(file: BinaryIO, path: str, *, offset: int, length: int) -> ZipArchive:
    """Reads and checks the directory of the zip in ``length`` bytes from ``offset``.

    Raises:
        IncompleteCheckpointError: no central directory: truncated, or still being written.
        CorruptFileError: the directory contradicts itself or the file.
        UnsafeFileError: compressed or encrypted records, or a directory of absurd size.
    """
    return _DirectoryReader(file, path, offset, length).read()


@dataclass(slots=True)
class _DirectoryReader:
    file: BinaryIO
    path: str
    offset: int
    length: int

    def read(self) -> ZipArchive:
        start, size, count = self._find_directory()
        entries = _CentralParser(self._pread(start, size), self.path, start).entries(count)
        places = self._data_offsets(entries, start)
        records: dict[str, ZipRecord] = {}
        for (name, _, nbytes, crc32), place in zip(entries, places, strict=True):
            records[name] = ZipRecord(name, place, nbytes, crc32 or None)
        if len(records) != len(entries):
            raise self._corrupt("two records of the zip have the same name")
        return ZipArchive(path=self.path, offset=self.offset, length=self.length, records=records)

    def _find_directory(self) -> tuple[int, int, int]:
        """Start (relative to the zip), size in bytes and number of entries of the central directory."""
        tail_start = max(0, self.length - _END.size - _MAX_COMMENT_BYTES)
        tail = self._pread(tail_start, self.length - tail_start)
        found = tail.rfind(_END_MAGIC)
        while found >= 0 and not _ends_there(tail, found):
            found = tail.rfind(_END_MAGIC, 0, found)
        if found < 0:
            raise truncated_zip(self.path)
        _, disk, first_disk, here, count, size, start, _ = _END.unpack_from(tail, found)
        end = tail_start + found
        # torch writes the zip64 records always, needed or not.
        if self._has_locator(end):
            disk, first_disk, here, count, size, start, end = self._find_directory64(end)
        if disk or first_disk or here != count:
            raise self._corrupt("the zip claims to span several disks")
        if start + size != end or count * _CENTRAL.size > size:
            raise self._corrupt(
                "the central directory of the zip isn't where its end record says",
                expected=f"{count} entries in {size} bytes at {start}",
                found=f"the end record at {end}",
            )
        if size > _MAX_DIRECTORY_BYTES:
            raise UnsafeFileError("the directory of the zip is absurdly large", file=self.path, found=f"{size} bytes")
        return start, size, count

    def _has_locator(self, end: int) -> bool:
        start = end - _END64_LOCATOR.size
        return start >= _END64.size and self._pread(start, 4) == b"PK\x06\x07"

    def _find_directory64(self, end: int) -> tuple[int, int, int, int, int, int, int]:
        locator_start = end - _END64_LOCATOR.size
        _, _, start64, _ = _END64_LOCATOR.unpack(self._pread(locator_start, _END64_LOCATOR.size))
        if start64 > locator_start - _END64.size:
            raise self._corrupt("the zip64 end locator is damaged")
        fields = _END64.unpack(self._pread(start64, _END64.size))
        magic, record_size, _, _, disk, first_disk, here, count, size, start = fields
        if magic != b"PK\x06\x06" or start64 + 12 + record_size != locator_start:
            raise self._corrupt("the zip64 end record is damaged")
        return disk, first_disk, here, count, size, start, start64

    def _data_offsets(self, entries: list[_Entry], limit: int) -> list[int]:
        """Where the data of each entry starts in the file; checks that no two records overlap."""
        order = sorted(range(len(entries)), key=lambda index: entries[index][1])
        places = [0] * len(entries)
        window, window_start, end, gaps = b"", 0, 0, _GAPS
        for index in order:
            name, header, nbytes, _ = entries[index]
            if header < end or header + _LOCAL_BYTES > limit:
                raise self._corrupt(f"record {name} of the zip overlaps another one or the directory")
            if header - end not in gaps:
                raise self._corrupt(f"there is a hole before record {name} of the zip", found=f"{header - end} bytes")
            at = header - window_start
            if at + _LOCAL_BYTES > len(window):
                # Small records lie close together: one read fetches many headers. Large ones need one each.
                near = _BATCH_BYTES if nbytes < _BATCH_BYTES // 8 else _LOCAL_BYTES
                window, window_start, at = self._pread(header, min(near, limit - header)), header, 0
            magic, _, flags, method, name_bytes, extra_bytes = _LOCAL_TAIL.unpack_from(window, at)
            if magic != LOCAL_MAGIC:
                raise self._corrupt(f"record {name} of the zip has no header", expected=f"one at byte {header}")
            if method or flags & _ENCRYPTED:
                raise UnsafeFileError(f"record {name} is compressed or encrypted", file=self.path)
            if name_bytes != len(name.encode()):
                raise self._corrupt(f"record {name} of the zip has another name in its header")
            data = header + _LOCAL_BYTES + name_bytes + extra_bytes
            end = data + nbytes
            if end > limit:
                raise self._corrupt(f"record {name} of the zip reaches into the directory", found=f"{nbytes} bytes")
            gaps = _GAPS64 if max(nbytes, header) >= _MAX32 else _GAPS
            places[index] = self.offset + data
        if limit - end not in gaps:
            raise self._corrupt("there is a hole before the directory of the zip", found=f"{limit - end} bytes")
        return places

    def _pread(self, start: int, size: int) -> bytes:
        data = os.pread(self.file.fileno(), size, self.offset + start)
        if len(data) != size:
            raise truncated_zip(self.path)
        return data

    def _corrupt(self, what: str, *, expected: object = None, found: object = None) -> CorruptFileError:
        return CorruptFileError(what, file=self.path, expected=expected, found=found)


def truncated_zip(path: str) -> CheckpointError:
    """The error for a zip that starts well and has no end."""
    return IncompleteCheckpointError(
        "the file is truncated or still being written",
        file=path,
        expected="a zip with its directory at the end",
        found="the start of one",
        fix="wait until the save has finished, or copy the file again",
    )


def _ends_there(tail: bytes, at: int) -> bool:
    """Whether the end record at ``at`` reaches exactly to the end, its comment included."""
    if at + _END.size > len(tail):
        return False
    comment_bytes = int.from_bytes(tail[at + 20 : at + 22], "little")
    return at + _END.size + comment_bytes == len(tail)


_Entry = tuple[str, int, int, int]
"""Name, start of the local header relative to the zip, bytes, crc32."""


@dataclass(slots=True)
class _CentralParser:
    data: bytes
    path: str
    limit: int

    def entries(self, count: int) -> list[_Entry]:
        entries: list[_Entry] = []
        data, at, unpack, header_bytes = self.data, 0, _CENTRAL.unpack_from, _CENTRAL.size
        try:
            for _ in range(count):
                fields = unpack(data, at)
                magic, _, _, flags, method, _, _, crc32, packed, nbytes, name_bytes, extra_bytes, comment_bytes = (
                    fields[:13]
                )
                header = fields[16]
                if magic != b"PK\x01\x02":
                    raise CorruptFileError("the directory of the zip is damaged", file=self.path)
                at += header_bytes
                name = data[at : at + name_bytes].decode()
                at += name_bytes
                if 0xFFFFFFFF in (packed, nbytes, header):
                    packed, nbytes, header = _zip64(data[at : at + extra_bytes], packed, nbytes, header)
                at += extra_bytes + comment_bytes
                if method or flags & _ENCRYPTED or packed != nbytes:
                    raise UnsafeFileError(
                        f"record {name} is compressed or encrypted",
                        file=self.path,
                        expected="stored records, as torch writes",
                    )
                entries.append((name, header, nbytes, crc32))
        except (struct.error, UnicodeDecodeError) as error:
            raise CorruptFileError("the directory of the zip is damaged", file=self.path, found=error) from error
        if at != len(data):
            raise CorruptFileError("the directory of the zip has bytes left over", file=self.path)
        return entries


def _zip64(extra: bytes, packed: int, nbytes: int, header: int) -> tuple[int, int, int]:
    """Replaces the fields that are 0xffffffff by those of extra field 1, which holds just these, in a fixed order."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        at += 4
        if kind != 1:
            at += size
            continue
        values = iter(struct.unpack_from(f"<{size // 8}Q", extra, at))
        marks = (nbytes, packed, header)
        nbytes, packed, header = (next(values, mark) if mark == 0xFFFFFFFF else mark for mark in marks)
        return packed, nbytes, header
    return packed, nbytes, header
