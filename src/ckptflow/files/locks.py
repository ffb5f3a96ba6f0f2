"""Advisory locks on files and directories, given back by the kernel when their holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptflow.errors import OutputError

_OPEN_TRIES = 100
_SHARE_TRIES = 50
_SHARE_SECONDS = 0.01


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock file ``path``, made where it is missing; waits for another holder, after a call of ``on_wait``.

    The holder may remove the file (and its directory) before it lets go; a waiter then starts anew on a fresh file.

    Raises:
        OutputError: the file can't be made, or its file system has no locks.
    """
    while True:
        fd = _open(path)
        try:
            try:
                _lock(fd, on_wait)
            except OSError as error:
                raise OutputError(
                    "this file system has no locks", file=path, found=str(error), fix="choose a directory elsewhere"
                ) from error
            if _is_same_file(fd, path):
                yield
                return
        finally:
            os.close(fd)


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock file now.

    Raises:
        OutputError: it can't be asked.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise OutputError("can't ask a lock", file=path, found=error.strerror) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        raise OutputError("this file system has no locks", file=path, found=error.strerror) from error
    finally:
        os.close(fd)
    return False


@contextmanager
def in_use(path: Path) -> Iterator[None]:
    """Say to ``is_in_use``, of this host, that a file or directory is read; many may at once, and nothing is written.

    Where the path or the file system takes no locks, nobody is told.
    """
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        _share(fd)
    except OSError:
        pass  # whoever reads it will find out what is wrong with it
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def is_in_use(path: Path) -> bool:
    """Whether somebody has said so by ``in_use``; False where it can't be told."""
    return is_free(path, os.O_RDONLY) is False


def is_free(path: Path, access: int) -> bool | None:
    """Whether nobody holds a lock of either kind on it; None where that can't be told.

    Args:
        path: a file or directory.
        access: ``os.O_RDWR``, or ``os.O_RDONLY``, with which NFS tells nothing.
    """
    try:
        fd = os.open(path, access | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    finally:
        os.close(fd)
    return True


def _share(fd: int) -> None:
    for _ in range(_SHARE_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_SHARE_SECONDS)  # somebody asks at this moment, which takes microseconds


def _lock(fd: int, on_wait: Callable[[], None] | None) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if on_wait is not None:
            on_wait()
        fcntl.flock(fd, fcntl.LOCK_EX)


def _open(path: Path) -> int:
    tries = 0
    while True:
        tries += 1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            # The last holder removed the directory between the two calls; or, like /proc, it takes no files at all.
            if isinstance(error, FileNotFoundError) and tries < _OPEN_TRIES:
                continue
            if isinstance(error, PermissionError) and os.path.lexists(path):
                fix = "remove it if no run of its owner is at work, or choose a directory elsewhere"
                raise OutputError("a lock is another user's", file=path, found=error.strerror, fix=fix) from error
            raise OutputError(
                "can't write here",
                file=path.parent,
                found=error.strerror,
                fix="choose a directory elsewhere: OUT, or --work-dir of a run",
            ) from error


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.fstat(fd).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
