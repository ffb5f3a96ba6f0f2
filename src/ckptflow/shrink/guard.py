"""Which checkpoints must not be touched: steps that aren't complete, or still being written."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ckptflow.errors import CheckpointError, CkptflowError, IncompleteCheckpointError, UnsupportedCheckpointError
from ckptflow.formats import registry
from ckptflow.formats.base import Completeness, Location, ReadOptions

# A file of a step lies at most this deep in it: checkpoint-10/global_step10_universal/zero/NAME/fp32.pt is 4.
_LEVELS_ABOVE: Final = 4


def incomplete_steps(path: Path) -> dict[Path, str]:
    """Directories below ``path`` that hold an unfinished step, with the reason.

    A folder without a step number is no step but a bag of files, each judged by itself (pipeline layer files that
    somebody put aside, say): torch writes the directory of a file last, so that one still being written fails alone.

    Raises:
        IncompleteCheckpointError: ``path`` itself is such a step, or part of one.
    """
    below: dict[Path, str] = {}
    for location in _locations(path):
        if location.global_step is None or location.path.is_file():
            continue
        found = _check(location)
        if found.state == "complete":
            continue
        if path.is_relative_to(location.root):
            raise IncompleteCheckpointError(
                f"the checkpoint is {found.state}, and such a one is never shrunk",
                file=location.path,
                expected=f"a complete {location.layout} checkpoint",
                found=found.reason,
                fix="wait until its save has finished",
            )
        below[location.root] = f"the {location.layout} checkpoint is {found.state}: {found.reason}"
    return below


def _locations(path: Path) -> list[Location]:
    found = list(registry.find_below(path))
    for parent in list(path.parents)[:_LEVELS_ABOVE]:
        found += [location for location in registry.find_at(parent) if path.is_relative_to(location.root)]
    return found


def _check(location: Location) -> Completeness:
    try:
        found = registry.check(location)
        if found.state == "incomplete" and _is_unsupported(location):
            return Completeness(state="complete", reason=found.reason)
        return found
    except IncompleteCheckpointError as error:
        return Completeness(state="incomplete", reason=str(error))
    except CheckpointError as error:
        # Damage is reported file by file.
        return Completeness(state="complete", reason=str(error))


def _is_unsupported(location: Location) -> bool:
    """Whether the checkpoint is refused for what it is: its files can be shrunk though nobody can merge them."""
    try:
        registry.read(location, ReadOptions())
    except CkptflowError as error:
        return isinstance(error, UnsupportedCheckpointError)
    return False
