"""How much disk space one tree takes, and what deleting it frees."""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

# st_blocks counts these, whatever the file system's own block is: stat(2).
BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSize:
    """One file, or a directory with all below it.

    Attributes:
        apparent_bytes: sum of file sizes, each hard link counted once.
        allocated_bytes: disk space taken, as ``du`` counts it: holes take none.
        freed_bytes: disk space that goes free with it; what has another hard link elsewhere stays.
        file_count: files and directories.
        newest_mtime: newest modification time among them, in seconds since the epoch.
        unreadable: directories that can't be listed.
    """

    apparent_bytes: int
    allocated_bytes: int
    freed_bytes: int
    file_count: int
    newest_mtime: float
    unreadable: tuple[str, ...] = ()


def tree_size(path: Path) -> TreeSize | None:
    """Measure a tree; None where it is gone. Links are not followed; what vanishes meanwhile is nothing."""
    try:
        top = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    found = [top]
    unreadable: list[str] = []
    pending = [os.fspath(path)] if stat.S_ISDIR(top.st_mode) else []
    while pending:
        directory = pending.pop()
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    try:
                        found.append(entry.stat(follow_symlinks=False))
                    except FileNotFoundError:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            unreadable.append(directory)
    return _sum_up(found, unreadable)


def _sum_up(found: list[os.stat_result], unreadable: list[str]) -> TreeSize:
    files = [each for each in found if not stat.S_ISDIR(each.st_mode)]
    seen = Counter((each.st_dev, each.st_ino) for each in files if each.st_nlink > 1)
    linked = {(each.st_dev, each.st_ino): each for each in files if each.st_nlink > 1}
    alone = [each for each in found if stat.S_ISDIR(each.st_mode) or each.st_nlink <= 1]
    once = [*alone, *linked.values()]
    wholly = [*alone, *(each for inode, each in linked.items() if seen[inode] >= each.st_nlink)]
    return TreeSize(
        apparent_bytes=sum(each.st_size for each in once if not stat.S_ISDIR(each.st_mode)),
        allocated_bytes=sum(each.st_blocks for each in once) * BLOCK_BYTES,
        freed_bytes=sum(each.st_blocks for each in wholly) * BLOCK_BYTES,
        file_count=len(found),
        newest_mtime=max(each.st_mtime for each in found),
        unreadable=tuple(unreadable),
    )
