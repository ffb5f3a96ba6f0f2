"""Runs with several steps, some of them published for real, for the tests of retention and disk usage."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptflow.convert import convert
from ckptflow.discovery.destinations import destination_of
from ckptflow.discovery.discover import discover
from ckptflow.publish import upload
from ckptflow.request import ConvertRequest

OLD_SECONDS = 10_000.0


def age(directory: Path, seconds: float = OLD_SECONDS) -> Path:
    """Make everything in a directory look as if it had been written that long ago."""
    at = time.time() - seconds
    for path in (*directory.rglob("*"), directory):
        os.utime(path, (at, at), follow_symlinks=False)
    return directory


def publish(step: Path, uri: str, scratch: Path) -> None:
    """Convert and upload every role of a step."""
    for found in discover([step], settle_seconds=0):
        out = scratch / f"{step.name}-{found.location.role or 'model'}"
        convert(ConvertRequest(path=found.location.path, out=out, allow_nonfinite=True))
        upload(out, destination_of(found.location, uri))


def names_in(run: Path) -> set[str]:
    """Names of the directories and files of a run, hidden ones too, without trackers."""
    return {path.name for path in run.iterdir() if path.suffix != ".txt"}


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may write everywhere: be somebody else, where the tests run as root."""
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)


@contextmanager
def seen_by_nobody(directory: Path) -> Iterator[None]:
    """Be somebody else who may look into ``directory``, which pytest makes for its own user alone."""
    directory.chmod(0o755)
    for path in directory.parents:
        if path == Path(tempfile.gettempdir()):
            break
        path.chmod(0o711)
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
    with as_nobody():
        yield
