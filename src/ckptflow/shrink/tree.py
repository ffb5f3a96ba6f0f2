"""Shrinks all torch files at a path, one after the other."""

from __future__ import annotations

import fnmatch
import logging
import os
import stat as stat_module
import struct
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from ckptflow.errors import CkptflowError, UnsupportedCheckpointError, UsageError
from ckptflow.formats.registry import UNFINISHED_NAME, natural_key
from ckptflow.shrink.copying import Progress
from ckptflow.shrink.guard import incomplete_steps
from ckptflow.shrink.inplace import remove_stale, shrink_in_place
from ckptflow.shrink.plan import ShrinkPlan, plan_shrink
from ckptflow.torchfiles.legacy import is_legacy_start
from ckptflow.torchfiles.looks import HEAD_BYTES
from ckptflow.torchfiles.zipfiles import LOCAL_MAGIC

DEFAULT_PATTERNS: Final = ("*.pt", "*.pth", "*.bin", "*.ckpt")

_log = logging.getLogger(__name__)

Outcome = Literal["shrunk", "would-shrink", "unchanged", "skipped", "refused", "failed"]
"""``unchanged``: nothing to gain; ``skipped``: not a file to shrink; ``refused``: an unfinished step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrunkFile:
    """What became of one file (or of a step that was refused as a whole).

    Attributes:
        path: the file.
        before_bytes: its size before.
        after_bytes: its size now, or, where nothing was to be written, once shrunk.
        outcome: what was done.
        reason: why nothing was done.
    """

    path: str
    before_bytes: int
    after_bytes: int
    outcome: Outcome
    reason: str | None = None

    @property
    def saved_bytes(self) -> int:
        """Bytes freed."""
        return self.before_bytes - self.after_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkReport:
    """What became of all files, in the order in which they were met."""

    files: tuple[ShrunkFile, ...]

    @property
    def before_bytes(self) -> int:
        """Size of all files before."""
        return sum(file.before_bytes for file in self.files)

    @property
    def after_bytes(self) -> int:
        """Size of all files afterwards."""
        return sum(file.after_bytes for file in self.files)

    @property
    def saved_bytes(self) -> int:
        """Bytes freed."""
        return self.before_bytes - self.after_bytes

    @property
    def failures(self) -> tuple[ShrunkFile, ...]:
        """Files and steps that should have been shrunk and were not."""
        return tuple(file for file in self.files if file.outcome in ("failed", "refused"))

    def to_json(self) -> dict[str, object]:
        """As a JSON object; all sizes in bytes."""
        return {
            "before_bytes": self.before_bytes,
            "after_bytes": self.after_bytes,
            "saved_bytes": self.saved_bytes,
            "files": [asdict(file) | {"saved_bytes": file.saved_bytes} for file in self.files],
        }


def shrink_tree(
    path: str | os.PathLike[str],
    patterns: Sequence[str] | None = None,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ShrinkReport:
    """Shrinks each torch file at or below ``path`` in place, atomically, file by file.

    A file that fails is left as it was, and the others are done. Links are never followed out of ``path``. Directories
    below it that can't be read are passed over, and the log tells them.

    Args:
        path: a file or a directory.
        patterns: which names to take, such as ``*.pt``; matched against paths below ``path`` where they have a
            slash. None: ``DEFAULT_PATTERNS``, or any name where ``path`` is a file.
        dry_run: write nothing, and tell what would be saved.
        progress: called with numbers of bytes that add up to the sizes of all files.

    Raises:
        UsageError: no such path.
        IncompleteCheckpointError: ``path`` is a step, or part of one, that is incomplete or still being written.
    """
    root = Path(os.path.realpath(path))
    if not root.exists():
        raise UsageError("no such file or directory", file=path, fix="check the path")
    # Before anything is read, so that the files keep their times of last access too.
    accessed = {file: stat.st_atime_ns for file in _files(root, patterns) if (stat := _stat(file)) is not None}
    refused = incomplete_steps(root)
    files = [
        ShrunkFile(path=str(step), before_bytes=0, after_bytes=0, outcome="refused", reason=reason)
        for step, reason in refused.items()
    ]
    chosen = [file for file in accessed if not any(file.is_relative_to(step) for step in refused)]
    if not dry_run:
        for directory in dict.fromkeys(file.parent for file in chosen):
            remove_stale(directory)
    for file in chosen:
        shrunk = _shrink_one(file, accessed[file], dry_run=dry_run, progress=progress)
        is_gone = shrunk.outcome == "failed" and file != root and not file.exists()
        files.append(_left(file, 0, "skipped", "deleted meanwhile") if is_gone else shrunk)
    return ShrinkReport(files=tuple(files))


def candidate_bytes(path: str | os.PathLike[str], patterns: Sequence[str] | None = None) -> int:
    """Size of all files that ``shrink_tree`` would look at."""
    root = Path(os.path.realpath(path))
    return sum(stat.st_size for file in _files(root, patterns) if (stat := _stat(file)) is not None)


def _files(root: Path, patterns: Sequence[str] | None) -> Iterator[Path]:
    if not root.is_dir():
        if patterns is None or _matches(root.name, root.name, patterns):
            yield root
        return
    yield from _below(root, root, DEFAULT_PATTERNS if patterns is None else patterns)


def _below(directory: Path, root: Path, patterns: Sequence[str]) -> Iterator[Path]:
    try:
        with os.scandir(directory) as scan:
            entries = sorted(scan, key=lambda entry: natural_key(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return  # deleted meanwhile
    except PermissionError as error:
        if directory == root:
            raise
        _log.warning("%s: not looked at: %s", directory, error.strerror)
        return
    for entry in entries:
        path = directory / entry.name
        if UNFINISHED_NAME.search(entry.name) or entry.is_symlink():
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _below(path, root, patterns)
        elif _matches(entry.name, path.relative_to(root).as_posix(), patterns):
            yield path


def _matches(name: str, relative: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(relative if "/" in pattern else name, pattern) for pattern in patterns)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None  # gone meanwhile


def _shrink_one(path: Path, atime_ns: int, *, dry_run: bool, progress: Progress | None) -> ShrunkFile:
    stat = _stat(path)
    before, reported = 0 if stat is None else stat.st_size, 0

    def report(count: int) -> None:
        nonlocal reported
        count = min(count, before - reported)
        reported += count
        if progress is not None:
            progress(count)

    try:
        reason = _not_ours(path)
        plan = None if reason is not None else plan_shrink(path)
        if plan is not None and plan.rewrite is not None and not dry_run:
            shrink_in_place(plan.rewrite, report, atime_ns=atime_ns)
    except UnsupportedCheckpointError as error:
        return _left(path, before, "skipped", str(error))
    except (CkptflowError, OSError) as error:
        if _is_torchscript(path):
            return _left(path, before, "skipped", "a TorchScript program (torch.jit.save), not a checkpoint")
        return _left(path, before, "failed", str(error))
    finally:
        report(before)
    return _left(path, before, "skipped", reason) if plan is None else _done(plan, dry_run=dry_run)


def _done(plan: ShrinkPlan, *, dry_run: bool) -> ShrunkFile:
    if plan.rewrite is None:
        return _left(plan.path, plan.before_bytes, "unchanged", plan.reason)
    return ShrunkFile(
        path=str(plan.path),
        before_bytes=plan.before_bytes,
        after_bytes=plan.after_bytes,
        outcome="would-shrink" if dry_run else "shrunk",
    )


def _left(path: Path, nbytes: int, outcome: Outcome, reason: str | None) -> ShrunkFile:
    return ShrunkFile(path=str(path), before_bytes=nbytes, after_bytes=nbytes, outcome=outcome, reason=reason)


def _not_ours(path: Path) -> str | None:
    """Why a file isn't one to shrink; None for torch files, damaged ones included."""
    if path.suffix == ".distcp":
        return "the .metadata beside it records where each tensor lies in it"
    stat = path.lstat()
    if not stat_module.S_ISREG(stat.st_mode):
        return "not a regular file"
    if stat.st_nlink > 1:
        return f"it has {stat.st_nlink} hard links, and a new file would free nothing while they last"
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    looks_damaged = not head.strip(b"\0") or LOCAL_MAGIC.startswith(head[: len(LOCAL_MAGIC)])
    if head.startswith(LOCAL_MAGIC) or is_legacy_start(head) or looks_damaged:
        return None
    return "not a torch file"


def _is_torchscript(path: Path) -> bool:
    # Its code is compressed, which the reader of checkpoints refuses before it looks any further.
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, struct.error, OSError, NotImplementedError, ValueError):
        return False
