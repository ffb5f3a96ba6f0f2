"""From checkpoints to what is deleted as a whole: the step directory with all its roles, or a single file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ckptflow.discovery.discover import FoundCheckpoint, FoundState
from ckptflow.formats.base import Location
from ckptflow.formats.step_names import global_step_of

# From bad to good; a step is as good as the worst of its roles.
_STATES: tuple[FoundState, ...] = ("incomplete", "in-progress", "complete", "published")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUnit:
    """One step of a run.

    Attributes:
        path: its directory, or its single file.
        global_step: optimizer steps done; None where no name tells.
        checkpoints: what was found in it, one for each role.
    """

    path: Path
    global_step: int | None
    checkpoints: tuple[FoundCheckpoint, ...]

    @property
    def run(self) -> Path:
        """The directory that holds the run's steps."""
        return self.path.parent

    @property
    def state(self) -> tuple[FoundState, str]:
        """The worst state among the roles, and its reason."""
        worst = min(self.checkpoints, key=lambda found: _STATES.index(found.state))
        role = f"{worst.location.role}: " if len(self.checkpoints) > 1 and worst.location.role else ""
        return worst.state, f"{role}{worst.reason}"


def step_units(found: Iterable[FoundCheckpoint], root: Path) -> list[StepUnit]:
    """Sort checkpoints below ``root`` into steps.

    A step is the outermost directory that names its checkpoints' global step, as in ``checkpoint-5/global_step5``, and
    holds no checkpoint of another step; never one above ``root``.
    """
    checkpoints = list(found)
    steps_below: defaultdict[Path, set[int | None]] = defaultdict(set)
    for each in checkpoints:
        for path in _up_to(each.location.path, root):
            steps_below[path].add(each.location.global_step)
    groups: defaultdict[tuple[Path, int | None], list[FoundCheckpoint]] = defaultdict(list)
    for each in checkpoints:
        groups[_unit_of(each.location, root, steps_below)].append(each)
    return [
        StepUnit(path=path, global_step=step, checkpoints=tuple(members)) for (path, step), members in groups.items()
    ]


def _unit_of(
    location: Location, root: Path, steps_below: defaultdict[Path, set[int | None]]
) -> tuple[Path, int | None]:
    step = location.global_step
    for path in reversed(_up_to(location.path, root)):
        if step is not None and global_step_of(Path(path.name)) == step and steps_below[path] == {step}:
            return path, step
    # No name of its own says which step this is: never deleted.
    return location.path, None


def _up_to(path: Path, root: Path) -> list[Path]:
    """The path and the directories above it, up to ``root``."""
    return [p for p in (path, *path.parents) if p.is_relative_to(root)]
