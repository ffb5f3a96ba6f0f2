"""``latest_checkpointed_iteration.txt``: the step that a run names as saved, written after everything else.

It hints and proves nothing: some trainers never write it, some write it in place, and old ones lie about.
"""

from __future__ import annotations

import time
from pathlib import Path

TRACKER_NAME = "latest_checkpointed_iteration.txt"
# A tracker that lags behind says "still writing" only while the save is young.
TRUSTED_SECONDS = 1800
MAX_BYTES = 32


def tracked_step(directory: Path) -> int:
    """The step that the tracker above a checkpoint's directory names; -1 where there is none or it names none (yet)."""
    text = _tracker_text(directory)
    return int(text) if text is not None and text.isdecimal() else -1


def tracker_lag(directory: Path, step: int | None, newest_mtime_ns: int) -> str | None:
    """Why the tracker speaks against a checkpoint whose files are all whole, for people; None where it doesn't.

    Args:
        directory: the checkpoint's directory, at most two below the tracker.
        step: the checkpoint's global step.
        newest_mtime_ns: when the last of its files was written, in nanoseconds.
    """
    text, tracked = _tracker_text(directory), tracked_step(directory)
    old = time.time() - newest_mtime_ns / 1e9 > TRUSTED_SECONDS
    if step is None or text is None or tracked >= step or old:
        return None
    return f"{TRACKER_NAME} still names step {tracked}" if tracked >= 0 else f"{TRACKER_NAME} names no step yet"


def _tracker_text(directory: Path) -> str | None:
    for parent in list(directory.parents)[:2]:
        try:
            with open(parent / TRACKER_NAME, "rb") as file:
                return file.read(MAX_BYTES).decode("ascii", "replace").strip()
        except OSError:
            continue  # no tracker here
    return None
