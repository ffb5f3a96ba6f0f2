"""Copies a file while its bytes are hashed, and reads the copy back from the disk while the rest is written.

One after another the three take three times as long: a disk takes bytes about as fast as a core makes their sha256.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256

from ckptflow.processes.pools import ended
from ckptflow.publish.targets import Progress

_CHUNK_BYTES = 4 << 20
_CHUNKS = 4
"""In memory at once."""

_SPAN_BYTES = 64 << 20
"""What is flushed and read back at once. What is left to the end fills the page cache, where the kernel has it wait."""


def copy_and_hash(source_fd: int, target_fd: int, progress: Progress, *, read_back: bool) -> tuple[str, str | None]:
    """Copy all of one file to another, which is empty, and flush it.

    Args:
        source_fd: is read from its position on.
        target_fd: is written, and read back, from its beginning.
        progress: is told the bytes of each chunk.
        read_back: whether to read the copy from the disk, past the page cache.

    Returns:
        The sha256, in hex, of what was read from the source, and of what the copy holds (None without ``read_back``).

    Raises:
        OSError: the file system failed.
    """
    read, found = sha256(), _Copy(target_fd, read_back)
    hashed: deque[Future[None]] = deque()
    seen: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1) as hashing, ThreadPoolExecutor(1) as reading, ended(hashed), ended(seen):
        written = flushed = 0
        for chunk in _chunks(source_fd, hashed):
            hashed.append(hashing.submit(read.update, chunk))
            write_all(target_fd, chunk)
            written += len(chunk)
            if written - flushed >= _SPAN_BYTES:
                seen.append(reading.submit(found.add, flushed, written))
                flushed = written
            progress(len(chunk))
        os.fsync(target_fd)
        seen.append(reading.submit(found.add, flushed, written))
        for future in (*hashed, *seen):
            future.result()
    return read.hexdigest(), found.sha256.hexdigest() if read_back else None


def _chunks(fd: int, used: deque[Future[None]]) -> Iterator[memoryview]:
    """The rest of a file in a ring of buffers; ``used`` holds what works on the chunks that were given, in order."""
    ring = [memoryview(bytearray(_CHUNK_BYTES)) for _ in range(_CHUNKS)]
    number = 0
    while True:
        if len(used) == _CHUNKS:
            used.popleft().result()
        buffer = ring[number % _CHUNKS]
        count = os.readv(fd, [buffer])
        if count == 0:
            return
        yield buffer[:count]
        number += 1


class _Copy:
    """A file that is still being written: flushed span by span, so that the disk is never idle, and read back."""

    def __init__(self, fd: int, read_back: bool) -> None:
        self._fd = fd
        self._read_back = read_back
        self._buffer = memoryview(bytearray(_CHUNK_BYTES))
        self.sha256 = sha256()

    def add(self, begin: int, end: int) -> None:
        """Take bytes ``[begin, end)``, which nobody writes any more."""
        os.fdatasync(self._fd)
        if not self._read_back:
            return
        # Out of the page cache, or the copy would be compared with itself.
        os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_DONTNEED)
        while begin < end:
            count = os.preadv(self._fd, [self._buffer[: end - begin]], begin)
            if count == 0:
                return  # cut off; the sum tells
            self.sha256.update(self._buffer[:count])
            begin += count


def write_all(fd: int, content: bytes | memoryview) -> None:
    """Write all of ``content``, however many calls it takes."""
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
