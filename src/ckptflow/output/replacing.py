"""What ``--overwrite`` replaces: a model, and never what a model could be made of again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ckptflow.errors import OutputError
from ckptflow.formats.huggingface import TRAINER_STATE
from ckptflow.formats.registry import find_at

_MODELS = ("huggingface", "peft")


def check_replaceable(out: Path, inputs: Iterable[Path], record: Mapping[str, Any] | None) -> None:
    """Let a directory be replaced by a new model only where nothing but an old one, or single files, are lost.

    Args:
        out: the directory, without links in its path.
        inputs: files and directories that the new model is made of.
        record: what ``out`` says of the model in it, if it holds one of ours.

    Raises:
        OutputError: it holds an input, a checkpoint of a trainer, the working directory, or directories of its own.
    """
    for what, paths in (("what the model is made of", inputs), ("where this command runs", _working_directory())):
        for path in paths:
            if Path(os.path.realpath(path)).is_relative_to(out):
                raise _never(out, path, what)
    ours = {PurePosixPath(name).parts[0] for name in (record or {}).get("files", ())}
    for entry in sorted(out.iterdir()):
        if entry.is_dir() and not entry.is_symlink() and entry.name not in ours:
            raise _never(out, entry, "a directory that is not of a model")
    if record is None:
        for location in find_at(out):
            if location.layout not in _MODELS or (out / TRAINER_STATE).exists():
                raise _never(out, location.path, f"a checkpoint of a trainer ({location.layout})")


def _working_directory() -> list[Path]:
    try:
        return [Path.cwd()]
    except FileNotFoundError:
        return []


def _never(out: Path, found: Path, what: str) -> OutputError:
    return OutputError(
        "OUT holds what --overwrite never replaces",
        file=out,
        found=f"{found}: {what}",
        fix="choose another OUT, or move that away",
    )
