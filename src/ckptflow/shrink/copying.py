"""Copies ranges of a file in blocks, with the crc32 taken on the way."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, Final

from ckptflow.errors import CorruptFileError, SourceChangedError
from ckptflow.torchfiles.checksums import crc32

BLOCK_BYTES: Final = 2**22

Progress = Callable[[int], None]
"""Called with the number of bytes just written."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of the source file.

    Attributes:
        offset: the first one, in bytes.
        nbytes: how many.
        crc32: what the file itself says; None where it doesn't, or says it of more than these bytes.
    """

    offset: int
    nbytes: int
    crc32: int | None = None


class Source:
    """The file that is shrunk, open for reading."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._fd = file.fileno()
        self._path = path
        self._buffer = bytearray(BLOCK_BYTES)

    def copy(self, span: Span, target: BinaryIO | None, progress: Progress | None = None) -> int:
        """Writes the bytes to ``target`` (None: reads them only); gives their crc32.

        Raises:
            SourceChangedError: the file has become shorter.
            CorruptFileError: the bytes aren't what the file says their crc32 is.
        """
        view, crc, at, end = memoryview(self._buffer), 0, span.offset, span.offset + span.nbytes
        while at < end:
            count = os.preadv(self._fd, [view[: min(BLOCK_BYTES, end - at)]], at)
            if not count:
                raise SourceChangedError("the file became shorter while it was read", file=self._path)
            crc = crc32(view[:count], crc)
            if target is not None:
                target.write(view[:count])
                if progress is not None:
                    progress(count)
            at += count
        if span.crc32 is not None and span.crc32 != crc:
            raise CorruptFileError(
                "a record of the file is damaged: its checksum differs",
                file=self._path,
                expected=f"crc32 {span.crc32:08x} in the {span.nbytes} bytes at {span.offset}",
                found=f"{crc:08x}",
                fix="restore the file from a copy; it was left as it is",
            )
        return crc
