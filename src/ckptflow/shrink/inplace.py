"""Replaces a file by its shrunk form in one step: written beside it, proven, then renamed over it.

At any moment the name stands for the whole old or the whole new file. What a killed run leaves is one file
``.NAME.ckptflow-shrink``; the next run takes it up or removes it. Whoever holds its lock works on it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ckptflow.errors import OutputError, SourceChangedError, VerificationError
from ckptflow.files.hidden import hidden_beside
from ckptflow.files.jsonfiles import fsync_directory
from ckptflow.shrink.copying import Progress, Source, Span
from ckptflow.shrink.plan import Rewrite
from ckptflow.shrink.prove import check_same

SUFFIX: Final = ".ckptflow-shrink"
_WRITE_BUFFER_BYTES: Final = 2**20
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_XATTRS: Final = (errno.ENOTSUP, errno.EPERM, errno.ENODATA, errno.EACCES)


def shrink_in_place(rewrite: Rewrite, progress: Progress | None = None, *, atime_ns: int | None = None) -> None:
    """Replaces the file; mode, owner, times and extended attributes stay.

    The bytes are synced to disk before the rename, and the directory after it.

    Args:
        rewrite: what to write, from ``plan_shrink``.
        progress: called with numbers of bytes written.
        atime_ns: time of last access that the file shall have; None: as when it was planned.

    Raises:
        SourceChangedError: somebody wrote to the file or replaced it meanwhile; it is left alone.
        CorruptFileError: its bytes don't have the checksums that it records.
        VerificationError: the shrunk file isn't the same; it is thrown away.
        OutputError: no room, no rights, or another run is at work on it.
    """
    path = Path(rewrite.file.path)
    with open(path, "rb") as file, _temporary(path) as temporary, _disk_full_named(path):
        _require_unchanged(path, rewrite.stat, os.fstat(file.fileno()))
        source = Source(file, str(path))
        for storage in rewrite.cut:
            # What is dropped can't be checked any more afterwards; damage must not become a sound file.
            if storage.crc32 is not None:
                source.copy(Span(storage.offset, storage.nbytes, storage.crc32), None)
        _write(rewrite, source, temporary, progress)
        accessed = rewrite.stat.st_atime_ns if atime_ns is None else atime_ns
        _set_times(temporary, accessed, rewrite.stat.st_mtime_ns)
        _require_unchanged(path, rewrite.stat, os.stat(path))
        os.replace(temporary, path)
        fsync_directory(path.parent)


def remove_stale(directory: Path) -> None:
    """Removes what killed runs left in a directory; a file that a living run works on stays."""
    try:
        entries = os.scandir(directory)
    except FileNotFoundError:
        return  # deleted meanwhile
    with entries:
        names = [entry.name for entry in entries if entry.name.startswith(".") and entry.name.endswith(SUFFIX)]
    for name in names:
        with contextlib.suppress(OSError, OutputError):
            fd = os.open(directory / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _lock(fd, directory / name):
                    os.unlink(directory / name)
            finally:
                os.close(fd)


def temporary_path(path: Path) -> Path:
    """Where the shrunk form of a file is written."""
    return hidden_beside(path, SUFFIX)


def _write(rewrite: Rewrite, source: Source, temporary: Path, progress: Progress | None) -> None:
    with open(temporary, "r+b", buffering=_WRITE_BUFFER_BYTES) as target:
        os.ftruncate(target.fileno(), 0)
        crcs = rewrite.new.write(source, target, progress)
        target.flush()
        found = os.fstat(target.fileno()).st_size
        if found != rewrite.new.nbytes:
            raise VerificationError(
                "the shrunk file has another size than planned",
                file=temporary,
                expected=rewrite.new.nbytes,
                found=found,
            )
        _keep_attributes(rewrite, target.fileno())
        os.fsync(target.fileno())
        check_same(rewrite.file, str(temporary), rewrite.pieces, crcs)


def _set_times(path: Path, atime_ns: int, mtime_ns: int) -> None:
    with open(path, "rb") as file:
        os.utime(file.fileno(), ns=(atime_ns, mtime_ns))
        os.fsync(file.fileno())


def _keep_attributes(rewrite: Rewrite, fd: int) -> None:
    path, stat, mine = rewrite.file.path, rewrite.stat, os.fstat(fd)
    if (stat.st_uid, stat.st_gid) != (mine.st_uid, mine.st_gid):
        try:
            os.fchown(fd, stat.st_uid, stat.st_gid)
        except PermissionError as error:
            raise OutputError(
                "the file belongs to somebody else, and its owner can't be kept",
                file=path,
                expected=f"to run as user {stat.st_uid}",
                found=f"user {mine.st_uid}",
                fix="run as its owner",
            ) from error
    os.fchmod(fd, stat.st_mode & 0o7777)
    try:
        for name in os.listxattr(path):
            _copy_xattr(path, fd, name)
    except OSError as error:
        if error.errno not in _NO_XATTRS:
            raise


def _copy_xattr(path: str, fd: int, name: str) -> None:
    try:
        os.setxattr(fd, name, os.getxattr(path, name))
    except OSError as error:
        # Some belong to the system, such as security labels, and are set by it.
        if error.errno not in _NO_XATTRS:
            raise


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """The empty file beside ``path``, locked; removed at the end unless it was renamed."""
    temporary = temporary_path(path)
    while True:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if _lock(fd, temporary):
                try:
                    yield temporary
                finally:
                    if _is_same_file(fd, temporary):
                        os.unlink(temporary)
                return
        finally:
            os.close(fd)


def _lock(fd: int, path: Path) -> bool:
    """Locks an open file; False where its name stands for another file by now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OutputError("another run is at work on this file", file=path) from error
    except OSError as error:
        raise OutputError("this file system has no locks", file=path, found=str(error)) from error
    return _is_same_file(fd, path)


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


@contextmanager
def _disk_full_named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OutputError(
            "no room to write the shrunk file beside the original, which was left as it is",
            file=path,
            found=os.strerror(error.errno),
            fix="free some space; smaller files first",
        ) from error


def _require_unchanged(path: Path, before: os.stat_result, now: os.stat_result) -> None:
    facts = [(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in (before, now)]
    if facts[0] != facts[1]:
        raise SourceChangedError(
            "the file changed while it was read, and was left alone",
            file=path,
            expected=f"{before.st_size} bytes, modified at {before.st_mtime_ns} ns",
            found=f"{now.st_size} bytes, modified at {now.st_mtime_ns} ns",
            fix="wait until its writer has finished",
        )
