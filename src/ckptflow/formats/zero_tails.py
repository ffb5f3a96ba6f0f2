"""Files whose end holds zeros: a writer that sets the size first and fills the file later leaves such a file meanwhile.

Size and header of it are right, and zeros are values like any others: padded vocabulary rows and layers that were
initialised with zeros end a file so too. So it is said, and a young checkpoint is not taken for finished; no more.
The same goes for holes: pages of a file that the file system was never given. Some file systems and copying tools make
them out of zeros.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path

from ckptflow.files.times import changed_at
from ckptflow.formats.base import Completeness
from ckptflow.formats.files import list_names
from ckptflow.formats.verdicts import YOUNG_SECONDS
from ckptflow.tensors import SourceFile

PAGE_BYTES = 4096
_MOST_BYTES = 2**24
# Zip files (torch) and DCP's end in a directory, and are refused without it.
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_DCP = ".distcp"


def zero_tail_bytes(path: str | Path) -> int:
    """Zero bytes at the end of a file in whole pages, at most 16 MiB; 0 where it vanished."""
    try:
        with open(path, "rb") as file:
            end = os.fstat(file.fileno()).st_size
            found = 0
            while found < _MOST_BYTES and end - found >= PAGE_BYTES:
                if any(os.pread(file.fileno(), PAGE_BYTES, end - found - PAGE_BYTES)):
                    break
                found += PAGE_BYTES
    except OSError:
        return 0
    return found


def hole_bytes(path: str | Path) -> int:
    """Bytes of a file that were never written, as far as its file system tells; 0 where it vanished."""
    found = at = 0
    try:
        with open(path, "rb") as file:
            fd, end = file.fileno(), os.fstat(file.fileno()).st_size
            while (hole := os.lseek(fd, at, os.SEEK_HOLE)) < end:
                at = _next_data(fd, hole, end)
                found += at - hole
    except OSError:
        return found
    return found


def _next_data(fd: int, at: int, end: int) -> int:
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # the hole goes to the end
            return end
        raise


def zero_tail_notes(files: Sequence[SourceFile]) -> Sequence[str]:
    """One sentence for each file that ends in zeros or has holes."""
    tails = {Path(file.path).name: zero_tail_bytes(file.path) for file in files if file.path.endswith(_SUFFIXES)}
    holes = {Path(file.path).name: hole_bytes(file.path) for file in files}
    return [
        *(
            f"{name} ends in {nbytes} zero bytes{_or_more(nbytes)}: if they are not padding, its "
            "writer did not write it to the end"
            for name, nbytes in tails.items()
            if nbytes
        ),
        *(
            f"{name} has holes of {nbytes} bytes, which read as zeros: if they were no zeros before, they were lost"
            for name, nbytes in holes.items()
            if nbytes and not tails.get(name)
        ),
    ]


def _or_more(nbytes: int) -> str:
    return " or more" if nbytes >= _MOST_BYTES else ""


def unless_growing(verdict: Completeness, path: Path) -> Completeness:
    """The verdict, but for a young file that ends in zeros: it may be being filled."""
    if verdict.state != "complete":
        return verdict
    for name in list_names(path) if path.is_dir() else [""]:
        file = path / name if name else path
        if not file.name.endswith((*_SUFFIXES, _DCP)) or not _is_young(file):
            continue
        tail = 0 if file.name.endswith(_DCP) else zero_tail_bytes(file)
        if tail or (holes := hole_bytes(file)):
            found = f"ends in {tail} zero bytes" if tail else f"has holes of {holes} bytes"
            reason = f"{file.name} {found} and changed lately: it may still be being written"
            return Completeness(state="in-progress", reason=reason)
    return verdict


def _is_young(path: Path) -> bool:
    try:
        now = time.time()
        return now - changed_at(path.stat(), now) < YOUNG_SECONDS
    except OSError:
        return False
