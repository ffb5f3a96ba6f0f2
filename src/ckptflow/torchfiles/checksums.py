"""The crc32 that torch records of each storage in its zip files, as a table of byte ranges; torch checks it nowhere."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32 as crc32
from zlib_ng.zlib_ng import crc32_combine as crc32_combine

from ckptflow.torchfiles.zipfiles import ZipRecord


class Stored(NamedTuple):
    """A range of a file with a recorded checksum.

    Attributes:
        number: its place in the table.
        begin: first byte.
        end: byte behind the last.
        crc32: of all of it.
    """

    number: int
    begin: int
    end: int
    crc32: int


class ChecksumTable:
    """The recorded checksums of one file by place; 24 bytes each, as there may be a million."""

    def __init__(self, records: Iterable[ZipRecord]) -> None:
        """Records without a checksum, and empty ones, are left out."""
        known = sorted((r.offset, r.offset + r.nbytes, r.crc32) for r in records if r.crc32 is not None and r.nbytes)
        self._begins = array("Q", (begin for begin, _, _ in known))
        self._ends = array("Q", (end for _, end, _ in known))
        self._crcs = array("Q", (crc for _, _, crc in known))

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, number: int) -> Stored:
        return Stored(number, self._begins[number], self._ends[number], self._crcs[number])

    def meeting(self, begin: int, end: int) -> Iterator[Stored]:
        """Ranges that share a byte with ``[begin, end)``, in order."""
        number = max(bisect_right(self._begins, begin) - 1, 0)
        while number < len(self) and self._begins[number] < end:
            if self._ends[number] > begin:
                yield self[number]
            number += 1
