"""Listing and opening the files of a checkpoint without leaving it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ckptflow.errors import IncompleteCheckpointError, UnsafeFileError
from ckptflow.tensors import SourceFile


def list_names(directory: Path) -> list[str]:
    """Names of the files (and links to files) in a directory, sorted; none if it vanished or is no directory."""
    try:
        with os.scandir(directory) as entries:
            return sorted(e.name for e in entries if not e.is_dir(follow_symlinks=False))
    except OSError:  # gone, no directory, not ours to read, or a name that no file system takes
        return []


def checked_file(path: Path, root: Path) -> SourceFile:
    """The file as it is now; it must be a regular file that really lies inside ``root``.

    Links that stay inside are followed, and so are those of the Hub's cache, ``snapshots/<revision>/x`` to ``blobs/y``.

    Raises:
        IncompleteCheckpointError: missing or empty.
        UnsafeFileError: it is a link out of ``root``, a device, pipe or socket, or no file system opens that name.
    """
    real = os.path.realpath(path)
    if not stays_inside(path, root):
        raise UnsafeFileError("a link leads out of the checkpoint", file=path, expected=f"inside {root}", found=real)
    try:
        found = os.stat(real)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise IncompleteCheckpointError("a file of the checkpoint is missing", file=path) from error
    except OSError as error:  # a name of absurd length, a loop of links, a directory that others own
        raise UnsafeFileError("a file of the checkpoint can't be opened", file=path, found=error.strerror) from error
    if not stat.S_ISREG(found.st_mode):
        raise UnsafeFileError("not a regular file", file=path)
    if found.st_size == 0:
        raise IncompleteCheckpointError(
            "a file of the checkpoint is empty", file=path, fix="wait until the save has finished, or save it again"
        )
    return SourceFile(str(path), found.st_size, found.st_mtime_ns)


def stays_inside(path: Path, root: Path) -> bool:
    """Whether a path really lies inside ``root``, or is a link of the Hub's cache to one of its blobs."""
    real = Path(os.path.realpath(path))
    return real.is_relative_to(os.path.realpath(root)) or any(_is_hub_blob(real, folder) for folder in path.parents)


def _is_hub_blob(real: Path, directory: Path) -> bool:
    # https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    if directory.parent.name != "snapshots":
        return False
    return real.parent == Path(os.path.realpath(directory.parent.parent)) / "blobs"
