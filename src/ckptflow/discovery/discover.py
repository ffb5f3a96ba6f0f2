"""Which checkpoints are under some roots, and which of them are complete.

Trainers write into final names, rename, and delete old steps while this looks: files that vanish between two calls
are normal here and never an error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ckptflow.errors import NotACheckpointError
from ckptflow.files.times import changed_at
from ckptflow.formats.base import Completeness, Location
from ckptflow.formats.registry import check, find_below, natural_key

SETTLE_SECONDS = 30.0

FoundState = Literal["complete", "incomplete", "in-progress", "published"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """One checkpoint under a root.

    Attributes:
        location: where it is.
        state: ``in-progress`` also where a file changed less than the settle time ago.
        reason: why, for people.
        newest_mtime: newest modification time in its directory, in seconds since the epoch (``filetimes.changed_at``).
    """

    location: Location
    state: FoundState
    reason: str
    newest_mtime: float

    def to_json(self) -> dict[str, Any]:
        """The entry behind ``detect --json``."""
        return {
            "path": str(self.location.path),
            "layout": self.location.layout,
            "global_step": self.location.global_step,
            "role": self.location.role,
            "state": self.state,
            "reason": self.reason,
        }


def discover(
    roots: Iterable[Path], *, settle_seconds: float = SETTLE_SECONDS, now: float | None = None
) -> Iterator[FoundCheckpoint]:
    """All checkpoints under the roots, in order of root, directory and global step.

    Args:
        roots: runs, step directories, or directories that hold runs.
        settle_seconds: time without a change of size or mtime before a checkpoint counts as complete.
        now: seconds since the epoch, for the settle time; None is the clock.

    Raises:
        NotACheckpointError: a root does not exist.
    """
    for root in roots:
        root = Path(os.path.abspath(root))
        if not root.exists():
            raise NotACheckpointError("no such file or directory", file=root, fix="check the path")
        for location in find_below(root):
            found = judge(location, settle_seconds, time.time() if now is None else now)
            if found is not None:
                yield found


def judge(location: Location, settle_seconds: float, now: float) -> FoundCheckpoint | None:
    """The state of one checkpoint; None where it was deleted meanwhile."""
    newest = newest_mtime(location.path, now)
    if newest is None:
        return None
    verdict = check(location)
    if verdict.state == "complete" and settle_seconds > 0 and now - newest < settle_seconds:
        reason = f"complete, but changed {now - newest:.0f} s ago; settle time is {settle_seconds:.0f} s"
        if newest > now:
            reason = f"complete, but {newest - now:.0f} s ahead of this machine's clock: set the clocks"
        verdict = Completeness(state="in-progress", reason=reason)
    return FoundCheckpoint(location=location, state=verdict.state, reason=verdict.reason, newest_mtime=newest)


def newest_mtime(path: Path, now: float) -> float | None:
    """When a file, or anything at or below a directory, was last changed; None if it is gone.

    In seconds since the epoch; ``now`` too, with which times from the future are told.
    """
    try:
        newest = changed_at(path.stat(), now)
        if not path.is_dir():
            return newest
        with os.scandir(path) as entries:
            for entry in entries:
                is_directory = entry.is_dir(follow_symlinks=False)
                below = newest_mtime(Path(entry.path), now) if is_directory else _mtime(entry, now)
                newest = max(newest, below or 0.0)
    except OSError:  # gone, or a link that leads nowhere
        return None
    return newest


def _mtime(entry: os.DirEntry[str], now: float) -> float | None:
    try:
        return changed_at(entry.stat(follow_symlinks=False), now)
    except OSError:
        return None


def by_step(found: Iterable[FoundCheckpoint]) -> list[FoundCheckpoint]:
    """Oldest global step first; numbers sort as numbers."""
    return sorted(
        found,
        key=lambda f: (
            -1 if f.location.global_step is None else f.location.global_step,
            natural_key(str(f.location.path)),
        ),
    )
