"""From the refusal of a checkpoint to its state: a save that still runs, or one that will not become whole."""

from __future__ import annotations

import time
from pathlib import Path

from ckptflow.errors import CheckpointError, IncompleteCheckpointError
from ckptflow.files.times import changed_at
from ckptflow.formats.base import Completeness, Format, Location, ReadOptions
from ckptflow.formats.torch_tensors import refuse_placeholders

# A file that changed this lately says that the writer may still be at work.
YOUNG_SECONDS = 120

UNFINISHED_MARK = ".incomplete"


def refused(error: CheckpointError, path: Path) -> Completeness:
    """What a refusal means for a checkpoint at ``path``, in one line."""
    where = f": {Path(error.file).name}" if error.file and Path(error.file) != path else ""
    found = f" ({error.found})" if error.found is not None and "\n" not in str(error.found) else ""
    young = isinstance(error, IncompleteCheckpointError) and time.time() - newest_mtime(path) < YOUNG_SECONDS
    return Completeness(state="in-progress" if young else "incomplete", reason=f"{error.what}{where}{found}")


def newest_mtime(path: Path) -> float:
    """Newest modification time (seconds) of a file, or of a directory and the files in it; 0 where all is gone."""
    newest, now = 0.0, time.time()
    try:
        for entry in (path, *(path.iterdir() if path.is_dir() else ())):
            newest = max(newest, changed_at(entry.stat(), now))
    except OSError:
        return newest
    return newest


def check_whole_file(reader: Format, location: Location) -> Completeness:
    """``Format.check`` of a layout of one file without a marker: it is complete if all of it can be read."""
    try:
        manifest = reader.read(location, ReadOptions())
        refuse_placeholders(manifest.tensors, location.path)
    except CheckpointError as error:
        return refused(error, location.path)
    return Completeness(state="complete", reason=f"the file is whole and holds {len(manifest.tensors)} tensors")


def unless_marked(verdict: Completeness, path: Path) -> Completeness:
    """The verdict, unless the trainer's own mark says that the step is still being written.

    NeMo Automodel puts it into the step's directory first and takes it away last; one that a killed save left stays.
    """
    marked = next((place for place in (path, *list(path.parents)[:2]) if (place / UNFINISHED_MARK).is_file()), None)
    if verdict.state != "complete" or marked is None:
        return verdict
    return Completeness(state="in-progress", reason=f"{UNFINISHED_MARK} in {marked.name}, which is taken away last")
