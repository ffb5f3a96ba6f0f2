"""The directory with config.json and tokenizer files that a trainer left near the weights."""

from __future__ import annotations

import os
from pathlib import Path

from ckptflow.errors import CheckpointError, UsageError
from ckptflow.files.jsonfiles import read_json_object
from ckptflow.formats.base import ReadOptions

CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 16 * 10**6


def find_config_dir(path: Path, root: Path) -> Path | None:
    """The nearest directory with a model's config.json: ``path``, one directory below it, then upwards to ``root``.

    None where there is none, or where several directories at one distance have one.
    """
    for level in (path, *path.parents):
        if not level.is_relative_to(root):
            return None
        if _is_model_config(level / CONFIG_NAME):
            return level
        children = [level / name for name in directory_names(level)]
        below = [child for child in children if _is_model_config(child / CONFIG_NAME)]
        if below:
            return below[0] if len(below) == 1 else None
    return None


def needed_config_dir(path: Path, root: Path, options: ReadOptions, why: str) -> Path:
    """The directory that a person named, or else the one that the trainer left.

    Raises:
        UsageError: there is none; ``why`` says what it is needed for.
    """
    found = options.config_dir or find_config_dir(path, root)
    if found is None:
        raise UsageError(
            "this checkpoint has no config.json", file=path, expected=why, fix="name a directory with --config DIR"
        )
    return found


def read_config(directory: Path) -> dict[str, object]:
    """The model's config.json.

    Raises:
        IncompleteCheckpointError: there is none.
        CorruptFileError: it does not parse.
    """
    return read_json_object(directory / CONFIG_NAME, MAX_CONFIG_BYTES)


def _is_model_config(path: Path) -> bool:
    """Whether a model's config is there, or something that should be one and can't be read."""
    if not path.is_file():
        return False
    try:
        config = read_config(path.parent)
    except (CheckpointError, OSError):
        return True
    return "model_type" in config or "architectures" in config


def directory_names(path: Path) -> list[str]:
    """Names of the directories in a directory, sorted; links to directories are left out."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
