"""The hidden directory beside OUT where a conversion works, resumes and from which it is renamed into place.

``OUT/../.NAME.ckptflow/`` holds ``lock`` and one directory per fingerprint. A weight file there is finished when its
record lies in ``records/``: the file was synced before its record was written. After ``kill -9`` the next run with
the same fingerprint takes up the finished files; a run with another fingerprint clears them away.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ckptflow.engine.record import WeightFileRecord
from ckptflow.errors import CheckpointError, OutputError
from ckptflow.files.hidden import hidden_beside
from ckptflow.files.jsonfiles import fsync_directory, read_json_object, write_json

RENAME_EXCHANGE = 2  # linux/fs.h
AT_FDCWD = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Where one conversion works.

    Attributes:
        out: the directory that it will become.
        fingerprint: identity of source and recipe.
    """

    out: Path
    fingerprint: str

    @property
    def base(self) -> Path:
        """The hidden directory beside ``out``."""
        return hidden_beside(self.out, ".ckptflow")

    @property
    def model(self) -> Path:
        """The directory that will be renamed to ``out``."""
        return self.base / self.fingerprint[:16]

    @property
    def records(self) -> Path:
        """Records of finished weight files, one JSON file each."""
        return self.base / f"{self.fingerprint[:16]}.records"

    @property
    def lock(self) -> Path:
        """Whoever works here holds it."""
        return self.base / "lock"

    def prepare(self) -> None:
        """Make the directories; remove what another conversion left here. Call it under ``lock``.

        Raises:
            OutputError: the directory is a link to another one.
        """
        if self.base.is_symlink():
            # In a directory for all, such as /tmp, it may be anybody's, and lead to anything.
            raise OutputError("the work directory is a link", file=self.base, fix="remove the link")
        keep = {self.model.name, self.records.name, self.lock.name}
        for entry in self.base.iterdir():
            if entry.name not in keep:
                _remove(entry)
        self.model.mkdir(exist_ok=True)
        self.records.mkdir(exist_ok=True)

    def finished(self, name: str) -> WeightFileRecord | None:
        """The record of a weight file that an earlier run finished, if the file is there at its full size."""
        path, weights = self.records / f"{name}.json", self.model / name
        try:
            record = WeightFileRecord.from_json(read_json_object(path))
            size = weights.stat().st_size
        except (CheckpointError, FileNotFoundError, KeyError, TypeError, ValueError):
            return None  # no record, or one that a crash tore: the file is written again
        return record if size == record.nbytes else None

    def keep(self, record: WeightFileRecord) -> None:
        """Mark a weight file as finished."""
        write_json(self.records / f"{record.name}.json", record.to_json())

    def publish(self) -> None:
        """Rename the finished model to ``out`` in one step; whatever was there is removed afterwards."""
        fsync_directory(self.model)
        if self.out.exists() and any(self.out.iterdir()):
            _exchange(self.model, self.out)
        else:
            os.rename(self.model, self.out)
        fsync_directory(self.out.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the hidden directory and all in it."""
        _remove(self.base)


def _exchange(a: Path, b: Path) -> None:
    """Swap two directories atomically (renameat2), or in two renames where the file system can't."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OutputError("can't replace OUT", file=b, found=os.strerror(code))
    old = a.with_name(f"{a.name}.old")
    os.rename(b, old)
    os.rename(a, b)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
