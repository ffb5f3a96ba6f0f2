"""The source's own checksums, compared while its bytes pass by: torch records a crc32 of each storage, and checks none.

A byte that flipped on disk or on the way there would otherwise be copied faithfully. A storage is read in blocks, by
several threads, for one weight file or for several; the crc32s of ranges side by side combine to that of both, so
that no byte is read a second time. Bytes of a storage that no plan wants, such as padding, are read in the end.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckptflow.engine.sources import SourceFiles
from ckptflow.errors import CorruptFileError
from ckptflow.plan import PlannedTensor
from ckptflow.tensors import Piece, SourceFile
from ckptflow.torchfiles.checksums import ChecksumTable, Stored, crc32, crc32_combine

_MOST_RANGES = 4096
"""Of one storage; one that is read in more of them is read again at the end, in order."""

_BLOCK_BYTES = 4 << 20
_MOST_NAMES = 4
"""A flat buffer holds hundreds of tensors."""

Range = tuple[int, int, int]
"""First byte in the file, byte behind the last, crc32."""


class Recorded(Protocol):
    """Where the checksums of source files are recorded."""

    def of(self, file: SourceFile) -> ChecksumTable:
        """Those of one file."""


class _Nothing:
    def of(self, file: SourceFile) -> ChecksumTable:
        return ChecksumTable(())


NOTHING_RECORDED: Recorded = _Nothing()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartlyRead:
    """A storage of which one weight file holds a part.

    Attributes:
        path: its file.
        begin: its first byte in the file.
        ranges: what was read of it; None where it was read in too many ranges to keep.
    """

    path: str
    begin: int
    ranges: tuple[Range, ...] | None

    def to_json(self) -> dict[str, object]:
        """Plain values for JSON."""
        ranges = None if self.ranges is None else [list(r) for r in self.ranges]
        return {"path": self.path, "begin": self.begin, "ranges": ranges}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PartlyRead:
        """What ``to_json`` made the data of."""
        ranges = None if data["ranges"] is None else tuple((a, b, crc) for a, b, crc in data["ranges"])
        return cls(path=data["path"], begin=data["begin"], ranges=ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What became of the storages that one weight file was made of.

    Attributes:
        storages: how many hold what torch recorded.
        nbytes: their bytes.
        partly: those that were not read whole.
    """

    storages: int = 0
    nbytes: int = 0
    partly: tuple[PartlyRead, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {"storages": self.storages, "nbytes": self.nbytes, "partly": [p.to_json() for p in self.partly]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Compared:
        """What ``to_json`` made the data of."""
        partly = tuple(PartlyRead.from_json(p) for p in data["partly"])
        return cls(storages=data["storages"], nbytes=data["nbytes"], partly=partly)


@dataclass(slots=True)
class _Reading:
    """One storage while it is read: ranges that somebody took on, and the checksums of those that are done."""

    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    by_begin: dict[int, tuple[int, int]] = field(default_factory=dict)
    by_end: dict[int, int] = field(default_factory=dict)
    scattered: bool = False

    def take(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Of ``[begin, end)`` the ranges that nobody took yet; they are taken now."""
        low, high = bisect_left(self.ends, begin), bisect_right(self.begins, end)
        edges = [begin]
        for taken in range(low, high):
            edges += (self.begins[taken], self.ends[taken])
        edges.append(end)
        free = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        self.begins[low:high] = [min(begin, *self.begins[low:high])] if low < high else [begin]
        self.ends[low:high] = [max(end, *self.ends[low:high])] if low < high else [end]
        return free

    def put(self, begin: int, end: int, crc: int) -> None:
        """Add a range that was taken, joined with its neighbours."""
        if begin in self.by_end:
            before = self.by_end.pop(begin)
            crc = crc32_combine(self.by_begin.pop(before)[1], crc, end - begin)
            begin = before
        if end in self.by_begin:
            behind, after = self.by_begin.pop(end)
            crc = crc32_combine(crc, after, behind - end)
            end = behind
        self.by_begin[begin], self.by_end[end] = (end, crc), begin
        self.scattered = self.scattered or len(self.by_begin) > _MOST_RANGES

    def ranges(self) -> tuple[Range, ...] | None:
        return None if self.scattered else tuple((a, b, crc) for a, (b, crc) in sorted(self.by_begin.items()))


class PassingChecksums:
    """Takes the checksums of what is read for one weight file. Shared by its threads."""

    def __init__(self, recorded: Recorded, tensors: Sequence[PlannedTensor]) -> None:
        """``tensors`` are those of the weight file, for messages."""
        self._recorded = recorded
        self._tensors = tensors
        self._lock = threading.Lock()
        self._tables: dict[SourceFile, tuple[ChecksumTable, bytearray]] = {}
        self._reading: dict[tuple[SourceFile, int], _Reading] = {}
        self._storages = self._nbytes = 0

    def add(self, file: SourceFile, offset_bytes: int, data: memoryview) -> None:
        """Take ``data``, which was just read from ``offset_bytes`` on.

        Raises:
            CorruptFileError: with it a storage is whole, and it is not what torch recorded.
        """
        table, done = self._tables.get(file) or self._open(file)
        for stored in table.meeting(offset_bytes, offset_bytes + len(data)):
            begin, end = max(stored.begin, offset_bytes), min(stored.end, offset_bytes + len(data))
            with self._lock:
                if done[stored.number]:
                    continue
                at_once = (begin, end) == (stored.begin, stored.end) and (file, stored.number) not in self._reading
                if at_once:
                    self._count(file, stored)
                else:
                    reading = self._reading.setdefault((file, stored.number), _Reading())
                    free = [] if reading.scattered else reading.take(begin, end)
            if at_once:
                _compare(file, stored, crc32(data[begin - offset_bytes : end - offset_bytes]), self._tensors)
                continue
            for low, high in free:
                crc = crc32(data[low - offset_bytes : high - offset_bytes])
                self._put(file, stored, reading, (low, high, crc))

    def compared(self) -> Compared:
        """All that became of it; call it when all was read."""
        partly = [
            PartlyRead(path=file.path, begin=self._tables[file][0][number].begin, ranges=reading.ranges())
            for (file, number), reading in self._reading.items()
        ]
        partly.sort(key=lambda part: (part.path, part.begin))
        return Compared(storages=self._storages, nbytes=self._nbytes, partly=tuple(partly))

    def _open(self, file: SourceFile) -> tuple[ChecksumTable, bytearray]:
        with self._lock:
            if file not in self._tables:
                table = self._recorded.of(file)
                self._tables[file] = table, bytearray(len(table))
            return self._tables[file]

    def _put(self, file: SourceFile, stored: Stored, reading: _Reading, done: Range) -> None:
        with self._lock:
            reading.put(*done)
            whole = reading.by_begin.get(stored.begin)
            if whole is None or whole[0] != stored.end:
                return
            del self._reading[file, stored.number]
            self._count(file, stored)
        _compare(file, stored, whole[1], self._tensors)

    def _count(self, file: SourceFile, stored: Stored) -> None:
        self._tables[file][1][stored.number] = 1
        self._storages += 1
        self._nbytes += stored.end - stored.begin


def compare_the_rest(
    all_compared: Iterable[Compared],
    files: Sequence[SourceFile],
    recorded: Recorded,
    tensors: Sequence[PlannedTensor],
    threads: int,
) -> Compared:
    """Put together what several weight files read of the same storages, and compare those.

    What no plan wants of them, such as padding, is read here.

    Args:
        all_compared: of all weight files.
        files: the source files.
        recorded: their checksums.
        tensors: the plan's, for messages.
        threads: they read at once.

    Returns:
        The sum of it all; nothing is left in ``partly``.

    Raises:
        CorruptFileError: a storage is not what torch recorded.
        SourceChangedError: a file is not any more what its metadata was read from.
    """
    storages, nbytes = 0, 0
    together: dict[tuple[str, int], list[PartlyRead]] = {}
    for compared in all_compared:
        storages, nbytes = storages + compared.storages, nbytes + compared.nbytes
        for part in compared.partly:
            together.setdefault((part.path, part.begin), []).append(part)
    by_path = {file.path: file for file in files}

    def compare(place: tuple[str, int]) -> int:
        file = by_path[place[0]]
        stored = next(recorded.of(file).meeting(place[1], place[1] + 1))
        _compare(file, stored, _crc_of(file, stored, _apart(together[place]), sources), tensors)
        return stored.end - stored.begin

    with SourceFiles() as sources, ThreadPoolExecutor(threads) as pool:
        nbytes += sum(pool.map(compare, sorted(together)))
    return Compared(storages=storages + len(together), nbytes=nbytes)


def _apart(parts: Iterable[PartlyRead]) -> list[Range]:
    """Their ranges in order; one that overlaps another is left out."""
    apart: list[Range] = []
    for found in sorted(found for part in parts for found in part.ranges or ()):
        if not apart or found[0] >= apart[-1][1]:
            apart.append(found)
    return apart


def _crc_of(file: SourceFile, stored: Stored, ranges: Sequence[Range], sources: SourceFiles) -> int:
    """Of the whole storage; reads what lies between the ranges."""
    crc, at = 0, stored.begin
    buffer = memoryview(bytearray(min(_BLOCK_BYTES, stored.end - stored.begin)))
    for begin, end, known in (*ranges, (stored.end, stored.end, 0)):
        while at < begin:
            block = buffer[: min(len(buffer), begin - at)]
            sources.read_into(file, at, block)
            crc = crc32(block, crc)
            at += len(block)
        crc, at = crc32_combine(crc, known, end - begin), end
    return crc


def _compare(file: SourceFile, stored: Stored, found: int, tensors: Iterable[PlannedTensor]) -> None:
    if found == stored.crc32:
        return
    names = [t.fqn for t in tensors if any(_lies_in(piece, file, stored) for s in t.sources for piece in s.pieces)]
    more = len(names) - _MOST_NAMES
    raise CorruptFileError(
        "the bytes of a storage changed after torch saved them",
        file=file.path,
        tensor=", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "") or None,
        expected=f"crc32 {stored.crc32:08x} in the {stored.end - stored.begin} bytes at {stored.begin}",
        found=f"{found:08x}",
        fix="copy the file again from where it was saved, or take another step; one changed on purpose must be "
        "saved by torch",
    )


def _lies_in(piece: Piece, file: SourceFile, stored: Stored) -> bool:
    return piece.file == file and stored.begin <= piece.offset_bytes < stored.end
