"""Open source files: a bounded number of descriptors, whole reads, and proof that no file changed meanwhile."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from ckptflow.errors import SourceChangedError
from ckptflow.tensors import SourceFile

_MOST_OPEN_FILES = 256
"""Well below the usual soft limit of 1024 descriptors; thousands of rank files are opened in turn."""

_READ_AHEAD_BYTES = 2 << 20
"""Asked of the kernel whenever a read ends in another range of this size: its own read-ahead is lost when threads take
turns on a file. Asking beside each read would cost more than the read where parts are small."""


@dataclass(slots=True)
class _OpenFile:
    """``asked`` is the range that was read ahead of last, by number."""

    descriptor: int
    readers: int = 0
    asked: int = -1

    def read_ahead(self, end: int) -> None:
        """Have the kernel fetch what follows a read that ends at byte ``end``: most likely it is read next."""
        ended_in = end // _READ_AHEAD_BYTES
        if self.asked != ended_in:
            self.asked = ended_in
            nbytes = (ended_in + 2) * _READ_AHEAD_BYTES - end
            os.posix_fadvise(self.descriptor, end, nbytes, os.POSIX_FADV_WILLNEED)


class Passing(Protocol):
    """What looks at the bytes that are read."""

    def add(self, file: SourceFile, offset_bytes: int, data: memoryview) -> None:
        """Called by any thread with what it just read."""


class SourceFiles:
    """Descriptors of source files, shared by all threads. Use as a context manager."""

    def __init__(self, passing: Passing | None = None) -> None:
        self._passing = passing
        self._lock = threading.Lock()
        self._open: dict[SourceFile, _OpenFile] = {}
        self._seen: set[SourceFile] = set()

    def __enter__(self) -> SourceFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for entry in self._open.values():
            os.close(entry.descriptor)
        self._open.clear()

    def read_into(self, file: SourceFile, offset_bytes: int, target: memoryview) -> None:
        """Fill ``target`` with the file's bytes from ``offset_bytes`` on.

        Raises:
            SourceChangedError: the file ends too early, is gone, or isn't the one that the metadata was read from.
            CkptflowError: what looks at the bytes refuses them.
        """
        entry = self._take(file)
        try:
            entry.read_ahead(offset_bytes + len(target))
            done = os.preadv(entry.descriptor, [target], offset_bytes)
            while done < len(target):
                count = os.preadv(entry.descriptor, [target[done:]], offset_bytes + done)
                if count == 0:
                    raise _changed("a source file ends too early", file, f"{offset_bytes + done} bytes")
                done += count
        finally:
            self._give_back(entry)
        if self._passing is not None:
            self._passing.add(file, offset_bytes, target)

    def check_unchanged(self) -> None:
        """Compare size and modification time of every file that was read with those of its metadata.

        Raises:
            SourceChangedError: they differ.
        """
        for file in self._seen:
            try:
                status = os.stat(file.path)
            except FileNotFoundError as error:
                raise _changed("a source file disappeared while it was read", file, "no file") from error
            _check_status(file, status)

    def _take(self, file: SourceFile) -> _OpenFile:
        with self._lock:
            entry = self._open.get(file) or self._add(file)
            entry.readers += 1
            return entry

    def _give_back(self, entry: _OpenFile) -> None:
        with self._lock:
            entry.readers -= 1

    def _add(self, file: SourceFile) -> _OpenFile:
        if len(self._open) >= _MOST_OPEN_FILES:
            self._close_idle()
        try:
            descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise _changed("a source file is gone", file, "no file") from error
        entry = self._open[file] = _OpenFile(descriptor)
        if file not in self._seen:
            self._seen.add(file)
            _check_status(file, os.fstat(descriptor))
        return entry

    def _close_idle(self) -> None:
        idle = [file for file, entry in self._open.items() if entry.readers == 0]
        for file in idle[: _MOST_OPEN_FILES // 2]:
            os.close(self._open.pop(file).descriptor)


def _check_status(file: SourceFile, status: os.stat_result) -> None:
    if (status.st_size, status.st_mtime_ns) != (file.nbytes, file.mtime_ns):
        raise _changed(
            "a source file changed while it was read",
            file,
            f"{status.st_size} bytes, modified at {status.st_mtime_ns} ns",
        )


def _changed(what: str, file: SourceFile, found: str) -> SourceChangedError:
    return SourceChangedError(
        what,
        file=file.path,
        expected=f"{file.nbytes} bytes, modified at {file.mtime_ns} ns",
        found=found,
        fix="wait until the training run has finished writing this checkpoint, then run again",
    )
