"""What changes when a file at or below a directory does, found by listing, without a look into any file."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from ckptflow.formats.registry import UNFINISHED_NAME, natural_key, tell_link

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What changes when a file below a directory does: newest time in ns, bytes of all files, number of entries."""

    newest_mtime_ns: int
    nbytes: int
    entries: int


@dataclass(slots=True, kw_only=True)
class Directory:
    """A directory, and those below that can be read."""

    path: str
    signature: Signature
    children: list[Directory] = field(default_factory=list)


def read_tree(path: str, seen: dict[str, Signature]) -> Directory | None:
    """All directories at and below ``path`` with their signatures; None where it is gone, or no directory.

    What is below names in the making, and below links, is left out; so is, as if it were gone, what can't be read:
    a directory of somebody else, or one on a file server that is away for a moment.
    """
    children: list[Directory] = []
    nbytes = entries = 0
    try:
        newest = os.stat(path).st_mtime_ns
        with os.scandir(path) as listing:
            for entry in listing:
                if entry.is_dir(follow_symlinks=False):
                    if not UNFINISHED_NAME.search(entry.name) and (child := read_tree(entry.path, seen)) is not None:
                        children.append(child)
                    continue
                if entry.is_symlink():
                    tell_link(entry.path)
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                newest = max(newest, found.st_mtime_ns)
                nbytes += found.st_size
                entries += 1
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _tell_unreadable(path, error.strerror)
        return None
    children.sort(key=lambda child: natural_key(os.path.basename(child.path)))
    below = [child.signature for child in children]
    signature = Signature(
        newest_mtime_ns=max([newest, *(s.newest_mtime_ns for s in below)]),
        nbytes=nbytes + sum(s.nbytes for s in below),
        entries=entries + sum(s.entries + 1 for s in below),
    )
    seen[path] = signature
    return Directory(path=path, signature=signature, children=children)


@lru_cache(maxsize=1024)
def _tell_unreadable(path: str, reason: str) -> None:
    """Once, not at each look."""
    _log.warning("%s: not looked at: %s", path, reason)


def signature_of(path: Path) -> Signature | None:
    """Of a checkpoint that is one file, or of a directory that was not read yet."""
    tree = read_tree(str(path), {})
    if tree is not None:
        return tree.signature
    try:
        found = path.stat()
    except OSError:
        return None
    return Signature(newest_mtime_ns=found.st_mtime_ns, nbytes=found.st_size, entries=1)


def bytes_below(path: Path) -> int:
    """Bytes of a checkpoint's files; 0 where it is gone."""
    signature = signature_of(path)
    return 0 if signature is None else signature.nbytes
