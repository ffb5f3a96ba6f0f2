"""What is there, seen with retention's eyes: steps with their size, use, pointers, metrics and proofs."""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ckptflow.discovery.discover import SETTLE_SECONDS, discover
from ckptflow.errors import PublishError, UsageError
from ckptflow.files.treesize import tree_size
from ckptflow.publish.several import Destination
from ckptflow.retention.metrics import file_metrics, run_metrics
from ckptflow.retention.pointers import named_steps
from ckptflow.retention.policy import CheckpointFacts, Decision, KeepBest, RetentionPolicy, plan_retention
from ckptflow.retention.proof import why_unproven
from ckptflow.retention.removal import Removal, carry_out, remove_leftovers
from ckptflow.retention.units import StepUnit, step_units
from ckptflow.retention.use import users

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRequest:
    """What a person asks of retention.

    Attributes:
        root: a run, or a directory that holds runs.
        policy: what to keep of each run.
        destinations: where the models are published, and how to reach them. At least one, to decide on anything.
        proven_at: whether a step has to be at ``all`` of them, or is proven already when it is at ``any``.
        settle_seconds: time without a change before a step counts as complete.
        metric_file: where to read the policy's metric, instead of the run's own files.
        metric_values: global step → value, from elsewhere; they come before those in files.
        metric_events: checkpoint → value, as events about single checkpoints brought them; they come before those in
            files too, and later ones before earlier ones.

    Raises:
        UsageError: a metric without a use for it.
    """

    root: Path
    policy: RetentionPolicy
    destinations: tuple[Destination, ...]
    proven_at: Literal["all", "any"] = "all"
    settle_seconds: float = SETTLE_SECONDS
    metric_file: Path | None = None
    metric_values: tuple[tuple[int, float], ...] = ()
    metric_events: tuple[tuple[Path, float], ...] = ()

    def __post_init__(self) -> None:
        has_metric = self.metric_file is not None or self.metric_values or self.metric_events
        if self.policy.keep_best is None and has_metric:
            raise UsageError("there is a metric, but no number of best steps to keep", fix="--best N --metric NAME")


def plan_root(request: RetentionRequest) -> list[Decision]:
    """Decide on each step below the root; deletes nothing.

    Raises:
        UsageError: no destination.
        NotACheckpointError: no such directory.
        CheckpointError: a file of metrics is refused.
        PublishError: a destination can't be asked.
    """
    units = units_below(request)
    return prove(request, units, survey(request, units))


def suppose_published(request: RetentionRequest) -> list[Decision]:
    """The decisions if every model were published: the most that retention could ever free."""
    return _suppose(request, survey(request, units_below(request)))


def units_below(request: RetentionRequest) -> list[StepUnit]:
    """All steps below the root."""
    root = Path(os.path.abspath(request.root))
    return step_units(discover([root], settle_seconds=request.settle_seconds), root)


def survey(request: RetentionRequest, units: Sequence[StepUnit]) -> list[CheckpointFacts]:
    """The facts about each step, but whether it is published; steps that vanished meanwhile are left out."""
    by_run: defaultdict[Path, list[StepUnit]] = defaultdict(list)
    for unit in units:
        by_run[unit.run].append(unit)
    if request.metric_file is not None and len(by_run) > 1:
        raise UsageError(
            "one file of metrics can't tell several runs apart",
            file=request.metric_file,
            found=", ".join(sorted(str(run) for run in by_run)),
            fix="name one run as ROOT",
        )
    for pattern in request.policy.pinned:
        if not any(unit.path.match(pattern) for unit in units):
            _log.warning("the pin %s holds no step: none below %s is called so", pattern, request.root)
    used = users(units)
    facts = []
    for run, members in by_run.items():
        named = named_steps(run, members)
        values = _metrics(request, run, members)
        for unit in members:
            found = _facts(unit, request.settle_seconds)
            if found is not None:
                metric = None if unit.global_step is None else values.get(unit.global_step)
                facts.append(replace(found, metric=metric, in_use=used.get(unit.path), named_by=named.get(unit.path)))
    return facts


def _facts(unit: StepUnit, settle_seconds: float) -> CheckpointFacts | None:
    size = tree_size(unit.path)
    if size is None:
        return None
    state, reason = unit.state
    if size.unreadable:
        state, reason = "incomplete", f"{size.unreadable[0]} can't be read"
    quiet_seconds = max(0.0, time.time() - size.newest_mtime)
    if state == "complete" and quiet_seconds < settle_seconds:
        # Another part of the step than the checkpoint itself, such as the optimizer beside it.
        state, reason = "in-progress", f"changed {quiet_seconds:.0f} s ago; settle time is {settle_seconds:.0f} s"
    return CheckpointFacts(
        location=unit.path,
        run=unit.run,
        global_step=unit.global_step,
        state=state,
        state_reason=reason,
        freed_bytes=size.freed_bytes,
        newest_mtime=size.newest_mtime,
        file_count=size.file_count,
    )


def _metrics(request: RetentionRequest, run: Path, units: Sequence[StepUnit]) -> dict[int, float]:
    best: KeepBest | None = request.policy.keep_best
    if best is None:
        return {}
    if request.metric_file is not None:
        values = file_metrics(request.metric_file, best.metric)
    else:
        values = run_metrics(run, units, best.metric)
    of_units = {unit.path: unit.global_step for unit in units}
    told: dict[int, float] = {}
    for path, value in request.metric_events:
        step = next((of_units[place] for place in (path, *path.parents) if place in of_units), None)
        if step is not None:
            told[step] = value
    return values | told | dict(request.metric_values)


def prove(request: RetentionRequest, units: Sequence[StepUnit], facts: Sequence[CheckpointFacts]) -> list[Decision]:
    """The decisions, with a look at the destinations for each step that nothing else keeps.

    Raises:
        UsageError: no destination.
        PublishError: a destination can't be asked.
    """
    if not request.destinations:
        raise UsageError("retention needs a destination: only what is published may go", fix="--to DEST")
    by_path = {unit.path: unit for unit in units}
    destinations = [destination.with_credentials_at_hand() for destination in request.destinations]
    # What stays for other reasons needs no proof, and no requests.
    supposed = _suppose(request, facts)
    doomed = {decision.location for decision in supposed if decision.action == "delete"}
    proofs = {path: _unproven(by_path[path], destinations, request.proven_at) for path in doomed}
    known = [replace(each, unproven=proofs[each.location]) if each.location in doomed else each for each in facts]
    decided = {decision.location: decision for decision in plan_retention(known, request.policy)}
    return [
        decided[d.location] if d.action == "delete" else replace(d, facts=decided[d.location].facts) for d in supposed
    ]


def _suppose(request: RetentionRequest, facts: Sequence[CheckpointFacts]) -> list[Decision]:
    return plan_retention([replace(each, unproven=None) for each in facts], request.policy)


def _unproven(unit: StepUnit, destinations: Sequence[Destination], proven_at: Literal["all", "any"]) -> str | None:
    """What speaks against a step's being published at the destinations; None where it is proven.

    Raises:
        PublishError: a destination can't be asked, on which the answer depends.
    """
    reasons: list[str] = []
    unknown: PublishError | None = None
    for destination in destinations:
        try:
            reason = _unproven_at(unit, destination)
        except PublishError as error:
            unknown = unknown or error
            continue
        if reason is None and proven_at == "any":
            return None
        if reason is not None and proven_at == "all":
            return reason
        if reason is not None:
            reasons.append(reason)
    if unknown is not None:
        raise unknown
    return ", and ".join(reasons) or None


def _unproven_at(unit: StepUnit, destination: Destination) -> str | None:
    for found in unit.checkpoints:
        reason = why_unproven(found.location, unit.path, destination.uri, destination.settings)
        if reason is not None:
            role = f"{found.location.role}: " if len(unit.checkpoints) > 1 and found.location.role else ""
            return f"{role}{reason}"
    return None


def retain(request: RetentionRequest) -> tuple[list[Decision], list[Removal]]:
    """Decide and delete, after what killed runs left.

    Raises:
        As ``plan_root``; a step that can't be deleted is told in its removal.
    """
    leftovers = list(remove_leftovers(request.root))
    units = units_below(request)
    decisions = prove(request, units, survey(request, units))
    return decisions, [*leftovers, *carry_out(decisions, free_again(units))]


def free_again(units: Sequence[StepUnit]) -> Callable[[Path], str | None]:
    """For ``carry_out``: who uses a step at the moment before it is deleted."""
    by_path = {unit.path: unit for unit in units}
    return lambda path: users([by_path[path]]).get(path)
