"""sha256 of a file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

_BLOCK_BYTES = 4 << 20

HashProgress = Callable[[int], None]
"""Is told the bytes of each block."""


def sha256_file(path: Path, progress: HashProgress | None = None) -> str:
    """sha256 of a file, in hex.

    Raises:
        OSError: it can't be read.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if progress is not None:
                progress(count)
    return digest.hexdigest()
