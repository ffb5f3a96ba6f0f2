"""Whether the files of one checkpoint were written together, by their times.

A save over an older one that was killed, or whose rank died, leaves files of both: names, shapes and sizes are the
same, and values of two steps would be mixed without an error. Where the older save was made a while before, the times
of the files tell. Files that are written or copied one after the other have no long pause between them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import pairwise
from pathlib import Path

from ckptflow.errors import IncompleteCheckpointError
from ckptflow.formats.files import list_names
from ckptflow.tensors import SourceFile

# Ranks that wait for each other give up after 10 to 30 minutes (the timeouts of torch's process groups).
PAUSE_SECONDS = 1800
# A large file on a slow disk or line may take longer than that by itself.
SLOWEST_BYTES_PER_SECOND = 10**7
# safetensors writes beside and renames, under the names of https://docs.rs/tempfile (".tmp" and six characters).
_SAFETENSORS_PART = re.compile(r"\.tmp[A-Za-z0-9]{6}")


def check_written_together(files: Iterable[SourceFile]) -> None:
    """No pause between the times of the files is longer than the writing of the later one can have taken.

    Raises:
        IncompleteCheckpointError: there is one: the files may be of two saves.
    """
    for before, after in pairwise(sorted(files, key=lambda file: file.mtime_ns)):
        pause = (after.mtime_ns - before.mtime_ns) / 10**9
        if pause > PAUSE_SECONDS + after.nbytes / SLOWEST_BYTES_PER_SECOND:
            raise IncompleteCheckpointError(
                "files of one checkpoint were not written together: they may be of two saves into one directory, of "
                "which the newer save has not finished",
                file=after.path,
                expected=f"a time near that of {before.path}",
                found=f"{_duration(pause)} after it",
                fix="wait for the save to finish, or take another checkpoint; if they are of one save and were copied "
                "without their times, touch all of them, hidden ones too",
            )


def check_no_newer_part(directory: Path, files: Collection[SourceFile]) -> None:
    """No file that safetensors left half-written is younger than one of several weight files.

    Raises:
        IncompleteCheckpointError: there is one: the others may be of the save before.
    """
    oldest = min((file.mtime_ns for file in files), default=0)
    for name in list_names(directory) if len(files) > 1 else ():
        part = directory / name
        if _SAFETENSORS_PART.fullmatch(name) and part.lstat().st_mtime_ns > oldest:
            raise IncompleteCheckpointError(
                "a newer save into this directory has not finished",
                file=part,
                expected="no half-written file younger than the weights",
                fix="wait for the save to finish, or take another checkpoint: files of two saves may lie here",
            )


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds < 2 * 86400 else f"{seconds / 86400:.0f} days"
