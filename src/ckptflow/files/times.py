"""When a file was changed, where clocks disagree."""

from __future__ import annotations

import os


def changed_at(status: os.stat_result, now: float) -> float:
    """When a file was last changed, in seconds since the epoch.

    That is its modification time. One in the future, of a trainer whose clock is ahead or as a copy keeps it, says
    nothing; the file system's own clock says when the file came here.

    Args:
        status: of the file.
        now: seconds since the epoch.
    """
    return status.st_mtime if status.st_mtime <= now else min(status.st_mtime, status.st_ctime)
