"""One process at a time for each GPU of a machine, whoever started it.

A limit of the flow server counts for all machines together, and does not count what runs without a server. A slot is
an advisory lock on a file that all processes of the machine see; the kernel gives it back when its holder dies.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptflow.errors import DeviceError

DIRECTORY_ENV = "CKPTFLOW_GPU_LOCKS"
_DIRECTORY = "/tmp"
"""Not the user's run-time directory and not TMPDIR: everybody on the machine has to look at the same files."""

_POLL_SECONDS = 0.2
_BUSY = (errno.EAGAIN, errno.EACCES)


@contextmanager
def free_gpu(gpus: Sequence[str], on_wait: Callable[[], None] | None) -> Iterator[int | None]:
    """Hold one GPU that nobody holds.

    Args:
        gpus: names that are the same in all processes of the machine, such as UUIDs; the first free one is taken.
        on_wait: called a few times a second while all are taken, to say so or to raise; None: don't wait.

    Yields:
        Index of the GPU; None where all are taken and ``on_wait`` is None.

    Raises:
        DeviceError: a lock file can't be made or opened.
    """
    while (taken := _take_any(gpus)) is None and on_wait is not None:
        on_wait()
        time.sleep(_POLL_SECONDS)
    if taken is None:
        yield None
        return
    number, descriptor = taken
    try:
        yield number
    finally:
        os.close(descriptor)


def lock_path(gpu: str) -> Path:
    """The file behind a GPU's slot, in ``CKPTFLOW_GPU_LOCKS`` or ``/tmp``. It stays when the slot is given back."""
    return Path(os.environ.get(DIRECTORY_ENV) or _DIRECTORY) / f"ckptflow-gpu-{re.sub('[^A-Za-z0-9]+', '-', gpu)}.lock"


def _take_any(gpus: Sequence[str]) -> tuple[int, int] | None:
    for number, gpu in enumerate(gpus):
        descriptor = _take(lock_path(gpu))
        if descriptor is not None:
            return number, descriptor
    return None


def _take(path: Path) -> int | None:
    try:
        descriptor = _open(path)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not a file")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _BUSY:
                return None
            raise
    except OSError as error:
        raise DeviceError(
            "the lock of a GPU can't be taken",
            file=path,
            found=error.strerror,
            fix=f"set {DIRECTORY_ENV} to a directory that all users of the GPU can write to, or use --device cpu",
        ) from error
    return descriptor


def _open(path: Path) -> int:
    """Open for reading, which is enough for a lock and works on another user's file; create it where it is missing."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        with suppress(FileNotFoundError):
            return os.open(path, flags)
        with suppress(FileExistsError):  # another process was quicker
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
            os.fchmod(descriptor, 0o644)  # whatever the umask: others must be able to open it
            return descriptor
