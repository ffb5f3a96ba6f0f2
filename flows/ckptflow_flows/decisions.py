"""Whether a complete checkpoint that is not published needs a run: pure rules, the same for watch and sweep.

Both give a run the same idempotency key, made of the training run, the step, the recipe and the number of the try, so
that the server makes one run of what both of them ask for. The number of the try follows from how the last one ended.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from ckptflow.discovery.destinations import run_name, step_name
from ckptflow.formats.base import Location
from ckptflow_flows.settings import (
    Destination,
    Machine,
    Places,
    PostTraining,
    Recipe,
    Section,
    Validation,
    with_local_copy_checked,
)

Ended = Literal["active", "pending", "completed", "refused", "failed", "crashed", "cancelled"]

#: A process that was to start a run and died leaves it pending for ever.
PENDING_SECONDS = 900.0
#: Wait before a failed run is tried again; doubles with each try.
RETRY_SECONDS, RETRY_LIMIT_SECONDS = 300.0, 6 * 3600.0


class Making(Section):
    """What is made of each checkpoint: the parameters of post-training, without the path."""

    destinations: Places
    recipe: Recipe = Field(default_factory=Recipe, title="Recipe")
    machine: Machine = Field(default_factory=Machine, title="Machine")
    validation: Validation = Field(default_factory=Validation, title="Validation")

    @model_validator(mode="after")
    def _check_local_copy(self) -> Self:
        return with_local_copy_checked(self, self.machine, self.destinations)

    def parameters(self, location: Location) -> PostTraining:
        """The parameters of post-training for one checkpoint."""
        return PostTraining(
            path=location.path,
            destinations=self.destinations,
            recipe=self.recipe,
            machine=self.machine,
            validation=self.validation,
        )


class Patience(Section):
    """When to give a run up and when to try again, in seconds."""

    pending_seconds: float = Field(
        PENDING_SECONDS, gt=0, title="Pending", description="A run that is still pending after this was lost."
    )
    retry_seconds: float = Field(
        RETRY_SECONDS, ge=0, title="Retry", description="Wait before a failed run is tried again; doubles each time."
    )

    def wait_seconds(self, attempt: int) -> float:
        """How long to wait after try number ``attempt`` failed."""
        return min(self.retry_seconds * 2.0 ** (attempt - 1), RETRY_LIMIT_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRun:
    """The newest run for a checkpoint.

    Attributes:
        attempt: number of the try, from 1.
        ended: how it ended, or ``active`` or ``pending``.
        started_at: when it was started, or created where it never was, in seconds since the epoch.
        since: when it got into its present state, in seconds since the epoch.
        message: of its state.
    """

    attempt: int
    ended: Ended
    started_at: float
    since: float
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do with a checkpoint.

    Attributes:
        action: ``start`` run number ``attempt``; ``declare-lost`` the pending run, then start; ``wait`` until
            ``again_at`` and look again; ``leave`` it until its files change.
        attempt: number of the try to start.
        again_at: seconds since the epoch; None: when the run's state changes.
        reason: for people.
    """

    action: Literal["start", "declare-lost", "wait", "leave"]
    attempt: int = 0
    again_at: float | None = None
    reason: str = ""


def base_key(location: Location, making: Making) -> str:
    """Readable name and hash of what decides the result: path, destinations and recipe; not how or where to run."""
    identity = {
        "path": str(location.path),
        "destinations": sorted(_identity_of(destination) for destination in making.destinations),
        "recipe": making.recipe.model_dump(mode="json"),
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:20]
    return f"{run_name(location)}-{step_name(location)}-{digest}"


def _identity_of(destination: Destination) -> str:
    # What was refused because something else is there is tried anew once that may be replaced.
    return f"{destination.uri},overwrite" if destination.overwrite else destination.uri


def attempt_key(base: str, attempt: int) -> str:
    """The idempotency key of a try."""
    return base if attempt == 1 else f"{base}-{attempt}"


def decide(last: LastRun | None, newest_mtime: float, patience: Patience, now: float) -> Decision:
    """What a complete checkpoint needs whose model is not at all of its destinations.

    Args:
        last: its newest run; None where there was none.
        newest_mtime: when its files were last changed, in seconds since the epoch.
        patience: how long to wait.
        now: seconds since the epoch.
    """
    if last is None:
        return Decision(action="start", attempt=1, reason="new")
    following = last.attempt + 1
    if last.ended == "active":
        return Decision(action="wait", reason="a run is at work or waits for a worker")
    if last.ended == "pending":
        lost_at = last.since + patience.pending_seconds
        if now < lost_at:
            return Decision(action="wait", reason="a worker is starting the run")
        return Decision(action="declare-lost", attempt=following, reason="whoever was to start the run died")
    # Times from the future are newer than any run: they would start one after the other.
    if last.started_at < newest_mtime <= now:
        return Decision(action="start", attempt=following, reason="its files changed after the last run began")
    if last.ended in ("refused", "cancelled"):
        return Decision(action="leave", reason=f"{last.ended}: {last.message}")
    if last.ended == "crashed" and last.attempt == 1:
        return Decision(action="start", attempt=following, reason="the last run crashed")
    again_at = last.since + patience.wait_seconds(last.attempt)
    if now < again_at:
        return Decision(action="wait", again_at=again_at, reason=f"the last run {last.ended}; it is tried again later")
    return Decision(action="start", attempt=following, reason=f"the last run {last.ended}")
