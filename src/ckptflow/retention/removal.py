"""Deleting a step: renamed first, so that from one moment on nothing looks like a checkpoint, then removed.

A killed run leaves a ``.NAME.ckptflow-deleting`` beside the other steps, which the next run removes. The trainer may
rotate its checkpoints at the same time: what is gone already is as good as deleted.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckptflow.errors import OutputError
from ckptflow.files.hidden import hidden_beside
from ckptflow.files.jsonfiles import fsync_directory
from ckptflow.files.treesize import tree_size
from ckptflow.formats.registry import MAX_DEPTH, UNFINISHED_NAME
from ckptflow.retention.policy import Decision

SUFFIX = ".ckptflow-deleting"

Outcome = Literal["deleted", "gone", "changed", "failed", "leftover"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What became of one step that was to go.

    Attributes:
        location: its directory or file.
        outcome: ``deleted``; ``gone``: somebody was faster; ``changed``: it is not what was decided on, and stays;
            ``failed``; ``leftover``: what a killed run had begun to delete, and is deleted now.
        freed_bytes: disk space, in bytes.
        detail: why, where it was not deleted.
    """

    location: Path
    outcome: Outcome
    freed_bytes: int = 0
    detail: str = ""

    def to_json(self) -> dict[str, object]:
        """The entry behind ``retain --json``."""
        return {
            "path": str(self.location),
            "outcome": self.outcome,
            "freed_bytes": self.freed_bytes,
            "detail": self.detail,
        }


def carry_out(
    decisions: Iterable[Decision], still_free: Callable[[Path], str | None] = lambda path: None
) -> Iterator[Removal]:
    """Delete the steps that were decided to go, one after the other. One that fails doesn't keep the next from going.

    Args:
        decisions: of ``plan_root``.
        still_free: tells who began to use a step since it was decided on; None for nobody.
    """
    for decision in decisions:
        if decision.action != "delete":
            continue
        path = decision.location
        obstacle = _what_changed(decision) or still_free(path)
        if obstacle is not None:
            yield Removal(location=path, outcome="changed", detail=obstacle)
            continue
        try:
            is_gone = not _remove_step(path)
        except OutputError as error:
            yield Removal(location=path, outcome="failed", detail=str(error))
            continue
        if is_gone:
            yield Removal(location=path, outcome="gone", detail="somebody else deleted it")
        else:
            yield Removal(location=path, outcome="deleted", freed_bytes=decision.bytes)


def remove_leftovers(root: Path) -> Iterator[Removal]:
    """Remove what killed runs had begun to delete below ``root``."""
    for path in list(_leftovers(Path(os.path.abspath(root)), MAX_DEPTH)):
        size = tree_size(path)
        try:
            _remove(path)
        except OutputError as error:
            yield Removal(location=path, outcome="failed", detail=str(error))
            continue
        yield Removal(location=path, outcome="leftover", freed_bytes=size.freed_bytes if size else 0)


def _leftovers(directory: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(directory) as entries:
            names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except OSError:
        return  # no directory, gone, or not ours
    for name, is_directory in names:
        if name.startswith(".") and name.endswith(SUFFIX):
            yield directory / name
        elif is_directory and depth > 0 and not UNFINISHED_NAME.search(name):
            yield from _leftovers(directory / name, depth - 1)


def _what_changed(decision: Decision) -> str | None:
    facts, now = decision.facts, tree_size(decision.location)
    if now is None:
        return None  # gone: the rename finds out
    if (now.newest_mtime, now.file_count) != (facts.newest_mtime, facts.file_count):
        return "it changed after it was decided on"
    return None


def _remove_step(path: Path) -> bool:
    """Rename and remove; False where it was gone."""
    doomed = hidden_beside(path, SUFFIX)
    try:
        _check_removable(path)
        _remove(doomed)  # of a killed run, before the trainer made the same step again
        os.rename(path, doomed)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _cant_delete(path, error) from error
    fsync_directory(doomed.parent)
    _remove(doomed)
    return True


def _check_removable(path: Path) -> None:
    """Find directories that are read-only for us before anything was touched, and not in the middle.

    Raises:
        OutputError: one is.
        FileNotFoundError: it is gone.
    """
    directories = [path.parent]
    if stat.S_ISDIR(os.lstat(path).st_mode):
        directories += [Path(directory) for directory, _, _ in os.walk(path)]
    for directory in directories:
        if directory.exists() and not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
            raise OutputError(
                "can't delete: a directory is read-only",
                file=directory,
                fix="let the user who owns the checkpoints run this, or make the directory writable",
            )


def _remove(path: Path) -> None:
    def pass_over_missing(function: object, name: str, info: tuple[object, BaseException, object]) -> None:
        if not isinstance(info[1], FileNotFoundError):
            raise info[1]

    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, onerror=pass_over_missing)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise _cant_delete(path, error) from error


def _cant_delete(path: Path, error: OSError) -> OutputError:
    if error.errno == errno.EXDEV or error.errno == errno.EBUSY:
        fix = "it is a mount point: pin it, or unmount it"
    else:
        fix = "make the directory writable; the next run goes on where this one stopped"
    return OutputError("can't delete", file=error.filename or path, found=error.strerror, fix=fix)
