"""Write one file beside its final name, past the page cache where that works, and rename it when it is whole."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from ckptflow.engine.options import DISK_BLOCK_BYTES
from ckptflow.errors import OutputError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NOT_SUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to whole disk blocks."""
    return -(-nbytes // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES


class NewFile:
    """A file of known size that appears under its name when it is committed, or not at all.

    Use as a context manager; threads may write different ranges at once. Without ``commit``, or after an exception,
    nothing is left: neither ``path`` (unless it was there before) nor the part file beside it. A killed process leaves
    at most the part file, which the next run overwrites.

    Attributes:
        path: final name.
        part_path: name until the commit: ``.<name>.part``.
    """

    def __init__(self, path: Path, nbytes: int, *, direct_io: bool, durable: bool) -> None:
        self.path = path
        self.part_path = path.with_name(f".{path.name}.part")
        self._nbytes = nbytes
        self._durable = durable
        self._direct_io = direct_io
        self._descriptor = -1

    def __enter__(self) -> NewFile:
        try:
            with self._explained():
                self._descriptor = self._open()
                self._reserve()
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor >= 0:
            self._discard()

    def write(self, data: memoryview, offset_bytes: int) -> None:
        """Write whole disk blocks: page-aligned ``data``, length and offset multiples of ``DISK_BLOCK_BYTES``."""
        with self._explained():
            done = 0
            while done < len(data):
                done += self._write_some(data[done:], offset_bytes + done)

    def commit(self) -> None:
        """Cut the padding off, flush, and rename."""
        with self._explained():
            os.ftruncate(self._descriptor, self._nbytes)
            if self._durable:
                os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
            try:
                os.replace(self.part_path, self.path)
            except OSError:
                self._unlink()
                raise
            self._sync_name()

    def _sync_name(self) -> None:
        if not self._durable:
            return
        try:
            sync_directory(self.path.parent)
        except OSError:
            self.path.unlink()  # nobody must take a name for done that a power cut can undo
            raise

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        if self._direct_io:
            try:
                return os.open(self.part_path, flags | os.O_DIRECT, 0o666)
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
        return os.open(self.part_path, flags, 0o666)

    def _reserve(self) -> None:
        """Take the space now, so that a full disk is noticed before the work."""
        try:
            os.posix_fallocate(self._descriptor, 0, max(1, padded(self._nbytes)))
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise

    def _write_some(self, data: memoryview, offset_bytes: int) -> int:
        try:
            return os.pwrite(self._descriptor, data, offset_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._leave_direct_io():
                raise
        return os.pwrite(self._descriptor, data, offset_bytes)

    def _leave_direct_io(self) -> bool:
        """Some file systems take the flag in ``open`` and refuse the writes."""
        import fcntl

        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return bool(flags & os.O_DIRECT)

    def _discard(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._unlink()

    def _unlink(self) -> None:
        with suppress(FileNotFoundError):
            self.part_path.unlink()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _output_error(error, self.path, self._nbytes) from error


def page_buffer(nbytes: int, content: bytes = b"") -> memoryview:
    """Memory that begins at a page, as direct I/O wants it: ``content``, then zeros."""
    memory = memoryview(mmap.mmap(-1, nbytes))
    memory[: len(content)] = content
    return memory


def sync_directory(path: Path) -> None:
    """Make a rename inside the directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _output_error(error: OSError, path: Path, nbytes: int) -> OutputError:
    if error.errno in _NO_SPACE:
        return OutputError(
            "no space left for a weight file",
            file=path,
            expected=f"{nbytes} bytes free",
            found=_free_bytes(path.parent),
            fix="free space, or write to another file system",
        )
    fix = None
    if error.errno == errno.EFBIG:
        fix = "raise the limit on the size of a file (`ulimit -f`), or make smaller ones: --max-shard-size"
    return OutputError("a weight file can't be written", file=path, found=error.strerror or str(error), fix=fix)


def _free_bytes(directory: Path) -> str | None:
    try:
        status = os.statvfs(directory)
    except OSError:
        return None
    return f"{status.f_bavail * status.f_frsize} bytes free"
