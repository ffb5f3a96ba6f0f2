"""Hidden names beside others, which stay within what file systems take however long the other name is."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

#: Of one name in a directory, on all file systems of Linux that checkpoints are kept on.
NAME_MAX_BYTES = 255
_DIGEST_SIGNS = 16


def hidden_beside(path: Path, suffix: str) -> Path:
    """``.NAME`` and the suffix in the directory of ``path``; NAME is shortened where it has no room."""
    return path.with_name(f".{fitted(path.name, NAME_MAX_BYTES - 1 - len(suffix))}{suffix}")


def fitted(name: str, limit_bytes: int = NAME_MAX_BYTES) -> str:
    """The name itself where it fits, else its beginning and a digest of all of it: always the same, and its own."""
    data = os.fsencode(name)
    if len(data) <= limit_bytes:
        return name
    digest = hashlib.sha256(data).hexdigest()[:_DIGEST_SIGNS]
    # The cut may go through a sign of several bytes.
    return f"{data[: limit_bytes - 1 - _DIGEST_SIGNS].decode(errors='ignore')}-{digest}"
