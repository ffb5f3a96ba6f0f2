"""JSON from checkpoints, read with bounds; JSON of ours, written durably."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

from ckptflow.errors import CorruptFileError, IncompleteCheckpointError, UnsafeFileError
from ckptflow.files.hidden import hidden_beside

MAX_JSON_BYTES = 64 * 1024 * 1024


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        IncompleteCheckpointError: the file is missing or empty.
        UnsafeFileError: it is larger than ``max_bytes``.
        CorruptFileError: it is not JSON, or not an object.
    """
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise UnsafeFileError(
                "a JSON file is absurdly large", file=path, expected=f"≤ {max_bytes} bytes", found=size
            )
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise IncompleteCheckpointError("a file of the checkpoint is missing", file=path) from error
    if not data:
        raise IncompleteCheckpointError("a JSON file is empty", file=path, fix="it may still be being written")
    return parse_json_object(data, path)


def parse_json_object(data: bytes, origin: Path | str) -> dict[str, Any]:
    """The object in JSON bytes; duplicate keys, which readers resolve differently, are refused.

    Raises:
        IncompleteCheckpointError: the bytes are zeros.
        CorruptFileError: it is not JSON, or not an object.
    """
    if not data.strip(b"\0"):
        raise IncompleteCheckpointError(
            "nothing but zeros where JSON should be: its space was reserved and never written", file=origin
        )
    try:
        value = json.loads(data, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError("not valid JSON", file=origin, found=str(error)) from error
    if not isinstance(value, dict):
        raise CorruptFileError("not a JSON object", file=origin, found=type(value).__name__)
    return cast(dict[str, Any], value)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("an object has one key twice")
    return value


def write_json(path: Path, value: object) -> bytes:
    """Write ``value`` beside and rename, synced; returns the bytes written."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # Bytes of a file name that are no UTF-8 are lone surrogates in Python: JSON can write those as such escapes.
    data = text.encode(errors="backslashreplace")
    write_durably(path, data)
    return data


def write_durably(path: Path, data: bytes) -> None:
    """Write bytes under a temporary name, fsync, rename into place, fsync the directory."""
    beside = hidden_beside(path, ".part")
    with open(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make renames in a directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
