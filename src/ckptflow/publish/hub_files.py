"""Files as the Hub sees them: what is in a tree, and what is on its way into one."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from huggingface_hub import CommitOperationAdd
from huggingface_hub.lfs import UploadInfo

from ckptflow.publish.model import LocalFile
from ckptflow.publish.source import check_sha256, open_source
from ckptflow.publish.targets import Progress

#: The Hub takes larger files as LFS only, so that smaller ones are held in memory.
REGULAR_LIMIT_BYTES = 10 << 20
_SAMPLE_BYTES = 512
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeFile:
    """A file of a commit: size, git blob id (SHA-1), and the sha256 where it is an LFS file."""

    nbytes: int
    oid: str
    sha256: str | None

    @property
    def tag(self) -> str:
        """Changes when the content does."""
        return self.sha256 or self.oid


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A file that the next commit is to hold.

    Attributes:
        source: the content of a small file, else where the file lies.
        nbytes: size in bytes.
        sha256: hex digest of the content.
        git_oid: what git calls the content; empty for a file that is too large to be a regular one.
    """

    source: bytes | Path
    nbytes: int
    sha256: str
    git_oid: str

    @classmethod
    def of_bytes(cls, content: bytes) -> Staged:
        """From memory."""
        digest = hashlib.sha256(content).hexdigest()
        return cls(source=content, nbytes=len(content), sha256=digest, git_oid=git_blob_oid(content))

    @classmethod
    def of_file(cls, file: LocalFile) -> Staged:
        """From a local file, which is read and compared with its record.

        Raises:
            VerificationError: it is not what the record says.
        """
        if file.bytes > REGULAR_LIMIT_BYTES:
            check_file(file)
            return cls(source=file.path, nbytes=file.bytes, sha256=file.sha256, git_oid="")
        with open_source(file) as fd, open(fd, "rb", closefd=False) as stream:
            content = stream.read()
        check_sha256(file, hashlib.sha256(content).hexdigest())
        return cls.of_bytes(content)

    def is_in(self, found: TreeFile | None) -> bool:
        """Whether a file of a tree is this one."""
        if found is None or found.nbytes != self.nbytes:
            return False
        return found.sha256 == self.sha256 if found.sha256 else found.oid == self.git_oid


class Addition(CommitOperationAdd):
    """An addition that is not hashed again, and tells how many of its bytes were read to be sent."""

    def __init__(self, name: str, staged: Staged, progress: Progress | None = None) -> None:
        self._staged = staged
        self._progress = progress
        self.sent_bytes = 0
        source = staged.source
        super().__init__(path_in_repo=name, path_or_fileobj=source if isinstance(source, bytes) else str(source))

    def __post_init__(self) -> None:
        source = self._staged.source
        if isinstance(source, bytes):
            sample = source[:_SAMPLE_BYTES]
        else:
            with open(source, "rb") as file:
                sample = file.read(_SAMPLE_BYTES)
        self.upload_info = UploadInfo(
            size=self._staged.nbytes, sample=sample, sha256=bytes.fromhex(self._staged.sha256)
        )

    @contextmanager
    def as_file(self, with_tqdm: bool = False) -> Iterator[BinaryIO]:
        """The content; the client asks for a progress bar where it is going to send it."""
        source = self._staged.source
        with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
            yield cast(BinaryIO, _Counted(file, self._count) if with_tqdm else file)

    def _count(self, read_bytes: int) -> None:
        self.sent_bytes += read_bytes
        if self._progress is not None:
            self._progress(read_bytes)


class _Counted(io.BufferedIOBase):
    """Passes reads on and counts their bytes."""

    def __init__(self, file: BinaryIO, count: Progress) -> None:
        self._file = file
        self._count = count

    def read(self, size: int | None = -1, /) -> bytes:
        content = self._file.read(-1 if size is None else size)
        self._count(len(content))
        return content

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def check_file(file: LocalFile) -> None:
    """Raise VerificationError where the local file is not what the record says."""
    digest = hashlib.sha256()
    with open_source(file) as fd, open(fd, "rb", buffering=0, closefd=False) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    check_sha256(file, digest.hexdigest())


def git_blob_oid(content: bytes) -> str:
    """The id that git gives a file: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
