"""Reading the local side of an upload: by offset, in order, a few parts ahead of the work on them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ckptflow.errors import VerificationError
from ckptflow.publish.model import LocalFile
from ckptflow.publish.parts import PartPlan


@contextmanager
def open_source(file: LocalFile) -> Iterator[int]:
    """A file descriptor on the local file.

    Raises:
        VerificationError: it can't be read, or its size is not that of the record.
    """
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise VerificationError(
            "a file of the model can't be read",
            file=file.path,
            found=error.strerror,
            fix="give this user the right to read it; where it is gone, convert the checkpoint again",
        ) from error
    try:
        size = os.fstat(fd).st_size
        if size != file.bytes:
            raise not_as_recorded(file, f"{size} bytes", expected=f"{file.bytes} bytes")
        yield fd
    finally:
        os.close(fd)


def read_part(fd: int, file: LocalFile, plan: PartPlan, number: int) -> bytes:
    """The bytes of one part."""
    offset, length = plan.part(number)
    content = os.pread(fd, length, offset)
    if len(content) == length:
        return content
    memory = bytearray(length)  # a read may end early, though not at the file's end
    read_part_into(memory, fd, file, plan, number)
    return bytes(memory)


def read_part_into(memory: bytearray, fd: int, file: LocalFile, plan: PartPlan, number: int) -> None:
    """Fill memory of the part's length with its bytes."""
    offset, _ = plan.part(number)
    rest = memoryview(memory)
    while rest:
        count = os.preadv(fd, [rest], offset)
        if not count:
            raise not_as_recorded(file, f"{offset} bytes", expected=f"{file.bytes} bytes")
        offset, rest = offset + count, rest[count:]


def check_sha256(file: LocalFile, found: str) -> None:
    """Raise VerificationError where the content is not what the record says."""
    if found != file.sha256:
        raise not_as_recorded(file, f"sha256 {found}", expected=f"sha256 {file.sha256}")


def not_as_recorded(file: LocalFile, found: str, *, expected: str) -> VerificationError:
    """The error for a local file that changed after it was recorded."""
    return VerificationError(
        "a file is not what the record says",
        file=file.path,
        expected=expected,
        found=found,
        fix="convert the checkpoint again: the directory was changed after it was written",
    )
