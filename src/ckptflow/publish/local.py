"""``file:///DIR``: a directory on a file system, local or mounted."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ckptflow.errors import PermanentPublishError, TransientPublishError, UsageError
from ckptflow.files.jsonfiles import fsync_directory
from ckptflow.files.locks import is_free
from ckptflow.files.sha256 import sha256_file
from ckptflow.publish.copying import copy_and_hash, write_all
from ckptflow.publish.model import LocalFile, LocalModel
from ckptflow.publish.mounts import check_mounted
from ckptflow.publish.settings import PublishSettings
from ckptflow.publish.source import check_sha256, open_source
from ckptflow.publish.targets import Progress

_TEMP_PREFIX = ".ckptflow-upload-"
_WILL_HEAL = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EAGAIN, errno.EBUSY})
_CURES = {
    errno.ENOSPC: "free space, then run it again",
    errno.EDQUOT: "free space or raise the quota, then run it again",
    errno.EFBIG: "raise the limit on the size of a file (`ulimit -f`), or make smaller ones: --max-shard-size",
    errno.EROFS: "mount the file system for writing, or choose another directory",
    errno.ENAMETOOLONG: "choose a directory with a shorter name",
}
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})

_log = logging.getLogger(__name__)


class LocalTarget:
    """A directory as a destination.

    A file is written under a temporary name, flushed, read back, and linked to its final name, which fails where the
    name is taken. A killed run leaves temporary files only; each is locked by its living writer, so that the next run
    knows the dead ones and removes them. A file system without hard links gets a check and a rename instead.
    """

    large_files_at_once = 1

    def __init__(self, uri: str, settings: PublishSettings) -> None:
        self._uri = uri
        self._settings = settings
        self._root = _directory_of(uri)
        self._proofs: dict[tuple[str, str | None], str] = {}
        check_mounted(self._root.resolve())
        with self._store_errors(self._root):
            self._sweep()

    @property
    def uri(self) -> str:
        """The destination as it was given."""
        return self._uri

    @property
    def revision(self) -> None:
        """A directory has none."""
        return

    def close(self) -> None:
        """Nothing is held open between calls."""

    def prepare(self, model: LocalModel) -> None:
        """Refuse a directory inside of the model's, which would no longer hold what its record says alone."""
        if self._root.resolve().is_relative_to(model.directory.resolve()):
            raise UsageError(
                "the destination is the model directory itself, or lies in it",
                file=self._root,
                fix="choose another directory",
            )

    def check_rights(self) -> None:
        """Refuse a directory that can't be written; where it is not there, the nearest one above it."""
        with self._store_errors(self._root):
            there = next(path for path in (self._root, *self._root.parents) if path.exists())
            tempfile.TemporaryFile(dir=there).close()

    def list_files(self) -> dict[str, str]:
        """Name → inode, size and time of last change."""
        with self._store_errors(self._root):
            tags = {
                str(path.relative_to(self._root)): _tag(path)
                for path in self._walk()
                if not path.name.startswith(_TEMP_PREFIX)
            }
        return {name: tag for name, tag in tags.items() if tag is not None}

    def read_file(self, name: str) -> bytes | None:
        """Content of a small file, or None."""
        with self._store_errors(self._root / name):
            try:
                return (self._root / name).read_bytes()
            except FileNotFoundError:
                return None

    def put_bytes(self, name: str, content: bytes) -> bool:
        """Create a small file."""
        path = self._root / name
        with self._store_errors(path), self._temp_file(path) as (temp_fd, temp_path):
            write_all(temp_fd, content)
            os.fsync(temp_fd)
            return _link(temp_path, path)

    def put_file(self, file: LocalFile, progress: Progress) -> bool:
        """Copy a file; its sha256 is checked on the way, and that of the copy before it gets its name."""
        path = self._root / file.name
        with self._store_errors(path), self._temp_file(path) as (temp_fd, temp_path):
            with open_source(file) as fd:
                read, found = copy_and_hash(fd, temp_fd, progress, read_back=self._settings.verify != "size")
            check_sha256(file, read)
            if found not in (None, file.sha256):
                raise TransientPublishError(
                    "the copy is not what was written",
                    file=path,
                    expected=file.sha256,
                    found=found,
                    fix="run it again; if it comes back, look for errors of that disk",
                )
            is_created = _link(temp_path, path)
        if is_created:
            self._proofs[file.name, _tag(path)] = "size" if self._settings.verify == "size" else "sha256 read back"
        return is_created

    def prove_file(self, file: LocalFile) -> str | None:
        """The sha256 of the copy, read once; its size alone for a copy of this run and ``verify="size"``."""
        path = self._root / file.name
        with self._store_errors(path):
            try:
                if path.stat().st_size != file.bytes:
                    return None
                proof = self._proofs.get((file.name, _tag(path)))
                if proof is None and sha256_file(path) == file.sha256:
                    proof = "sha256 read back"
                    self._check_source(file)
                    self._proofs[file.name, _tag(path)] = proof
            except FileNotFoundError:
                return None
        return proof

    def delete_file(self, name: str) -> None:
        """Remove a file."""
        path = self._root / name
        with self._store_errors(path):
            if path.exists() or path.is_symlink():
                path.unlink(missing_ok=True)
                fsync_directory(path.parent)

    def tidy_file(self, name: str) -> None:
        """Temporary files of the dead were removed at the start, whatever they were to become."""

    def _check_source(self, file: LocalFile) -> None:
        if os.path.samefile(file.path, self._root / file.name):
            raise UsageError(
                "the destination is the model directory itself", file=self._root, fix="choose another directory"
            )
        check_sha256(file, sha256_file(file.path))

    def _walk(self) -> Iterator[Path]:
        for directory, _, names in os.walk(self._root, onerror=_raise_unless_absent):
            for name in names:
                yield Path(directory, name)

    def _sweep(self) -> None:
        for path in self._walk():
            if path.name.startswith(_TEMP_PREFIX) and is_free(path, os.O_RDWR):
                _log.info("%s: left by a run that died, removed", path)
                path.unlink(missing_ok=True)

    @contextmanager
    def _temp_file(self, path: Path) -> Iterator[tuple[int, Path]]:
        _make_directories(path.parent)
        temp_fd, temp_path = _create_locked(path.parent)
        try:
            yield temp_fd, temp_path
        finally:
            temp_path.unlink(missing_ok=True)
            os.close(temp_fd)

    @contextmanager
    def _store_errors(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _WILL_HEAL:
                fix = "run it again; if it comes back, look at the mount and its server"
                raise TransientPublishError(
                    "the file system failed", file=path, found=error.strerror, fix=fix
                ) from error
            fix = _CURES.get(error.errno or 0, "make the directory writable")
            raise PermanentPublishError("can't write there", file=path, found=error.strerror, fix=fix) from error


def _directory_of(uri: str) -> Path:
    parts = urlsplit(uri)
    path = Path(unquote(parts.path))
    is_here = parts.netloc in ("", "localhost") and path.is_absolute() and path != Path("/")
    if not is_here or "?" in uri or "#" in uri or "\0" in str(path):
        raise UsageError(
            "not a directory on this machine",
            expected="file:///DIR, with %3F for ? and %23 for #",
            found=uri if "@" not in parts.netloc else "a user name or password in the address",
            fix="give the whole path after file://, as in file:///data/models",
        )
    return path


def _raise_unless_absent(error: OSError) -> None:
    # os.walk would take a directory that can't be read for an empty one.
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _make_directories(path: Path) -> None:
    """mkdir -p, durable."""
    if not path.is_dir():
        _make_directories(path.parent)
        path.mkdir(exist_ok=True)
        fsync_directory(path.parent)


def _create_locked(directory: Path) -> tuple[int, Path]:
    while True:
        path = directory / f"{_TEMP_PREFIX}{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # A sweeper was faster, between open and lock; it takes the file away.
            os.close(fd)
            continue
        except OSError:
            return fd, path  # no locks here; then nobody sweeps either
        if os.fstat(fd).st_nlink:
            return fd, path
        os.close(fd)


def _link(temp_path: Path, path: Path) -> bool:
    """Give a finished file its name, unless the name is taken; durable on return."""
    try:
        os.link(temp_path, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            return False
        os.rename(temp_path, path)
    fsync_directory(path.parent)
    return True


def _tag(path: Path) -> str | None:
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return None
    return f"{facts.st_ino}-{facts.st_size}-{facts.st_mtime_ns}"
