"""What to keep: a pure rule over facts. Each reason to keep a step is enough; only what has none may be deleted."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckptflow.discovery.discover import FoundState
from ckptflow.errors import UsageError
from ckptflow.formats.registry import natural_key

Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepBest:
    """Keep the ``count`` steps with the best value of a metric; ``mode`` says whether the least or the largest is best.

    Raises:
        UsageError: the count is not positive, the mode unknown or the metric has no name.
    """

    count: int
    metric: str
    mode: Mode

    def __post_init__(self) -> None:
        _check_positive("the number of best steps to keep", self.count)
        if self.mode not in ("min", "max"):
            raise UsageError("no such mode of a metric", expected="min or max", found=self.mode)
        if not self.metric.strip():
            raise UsageError("the best steps need the name of a metric", fix="--metric NAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """What a person wants to keep of each run.

    Attributes:
        keep_newest: how many of the newest complete steps; at least one.
        keep_every: each global step that this number divides.
        keep_best: the best by a metric.
        pinned: globs of step directories that stay, matched part by part from the right: ``global_step_500``,
            ``my-run/checkpoint-*``.

    Raises:
        UsageError: a number is 0 or less (-1 doesn't mean "all" here), or a glob is empty.
    """

    keep_newest: int = 2
    keep_every: int | None = None
    keep_best: KeepBest | None = None
    pinned: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_positive("the number of newest steps to keep", self.keep_newest)
        if self.keep_every is not None:
            _check_positive("the distance of steps to keep", self.keep_every)
        for pattern in self.pinned:
            if not pattern.strip("/ "):
                raise UsageError("a pattern of pinned steps is empty", found=repr(pattern))


def _check_positive(what: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise UsageError(f"{what} is not a positive number", expected="1 or more", found=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """One step as it was found: a directory with all roles of a global step, or a single file.

    Attributes:
        location: the directory or file that would be deleted as a whole.
        run: the directory of its training run; a policy is applied to each run by itself.
        global_step: optimizer steps done; None where names don't tell, and then it is never deleted.
        state: the worst among its roles.
        state_reason: why, for people.
        freed_bytes: disk space that goes free with it, in bytes.
        newest_mtime: newest modification time of anything in it, in seconds since the epoch.
        file_count: files and directories in it.
        metric: value of the policy's metric at this step; None where it is not known.
        in_use: who uses it; None for nobody that can be seen.
        named_by: the tracker, link or file that names it as the one to load; None for none.
        unproven: what of it is not proven to be published; None only where every role was proven at the destinations.
    """

    location: Path
    run: Path
    global_step: int | None
    state: FoundState
    state_reason: str
    freed_bytes: int
    newest_mtime: float
    file_count: int
    metric: float | None = None
    in_use: str | None = None
    named_by: str | None = None
    unproven: str | None = "not looked for at any destination"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is to become of one step.

    Attributes:
        location: the directory or file.
        global_step: optimizer steps done.
        action: ``keep`` or ``delete``.
        reasons: every reason to keep it, or what allows to delete it.
        bytes: disk space that goes free with it, in bytes.
        facts: what was known when it was decided; a step that changed since is left alone.
    """

    location: Path
    global_step: int | None
    action: Literal["keep", "delete"]
    reasons: tuple[str, ...]
    bytes: int
    facts: CheckpointFacts

    def to_json(self) -> dict[str, object]:
        """The entry behind ``retain --json``."""
        return {
            "path": str(self.location),
            "global_step": self.global_step,
            "action": self.action,
            "reasons": list(self.reasons),
            "bytes": self.bytes,
        }


def plan_retention(found: Sequence[CheckpointFacts], policy: RetentionPolicy) -> list[Decision]:
    """Decide on each step, by run and then by global step; numbers sort as numbers.

    Never deleted are steps that are not complete, are in use, are named by a tracker, are not proven to be published,
    and the newest complete step of each run, whatever the policy says.
    """
    runs: defaultdict[Path, list[CheckpointFacts]] = defaultdict(list)
    for facts in found:
        runs[facts.run].append(facts)
    decisions = []
    for run in sorted(runs, key=lambda path: natural_key(str(path))):
        wanted = _wanted(runs[run], policy)
        for facts in sorted(runs[run], key=_age):
            decisions.append(_decide(facts, (*_obstacles(facts), *wanted.get(facts.location, ())), policy))
    return decisions


def _age(facts: CheckpointFacts) -> tuple[int, list[tuple[int, int | str]]]:
    return (-1 if facts.global_step is None else facts.global_step, natural_key(str(facts.location)))


def _decide(facts: CheckpointFacts, reasons: tuple[str, ...], policy: RetentionPolicy) -> Decision:
    allowed = (f"published, and older than the newest {policy.keep_newest}",)
    return Decision(
        location=facts.location,
        global_step=facts.global_step,
        action="keep" if reasons else "delete",
        reasons=reasons or allowed,
        bytes=facts.freed_bytes,
        facts=facts,
    )


def _obstacles(facts: CheckpointFacts) -> list[str]:
    """Why a step must stay whatever anybody wants."""
    reasons = []
    # "published" is a complete checkpoint that somebody found at its destination already.
    if facts.state not in ("complete", "published"):
        reasons.append(f"{facts.state}: {facts.state_reason}")
    if facts.global_step is None:
        reasons.append("its name tells no global step, so neither its age")
    if facts.in_use is not None:
        reasons.append(f"in use: {facts.in_use}")
    if facts.named_by is not None:
        reasons.append(facts.named_by)
    if facts.unproven is not None:
        reasons.append(f"not proven to be published: {facts.unproven}")
    return reasons


def _wanted(run: Iterable[CheckpointFacts], policy: RetentionPolicy) -> Mapping[Path, list[str]]:
    """Location → what the policy wants it for."""
    reasons: defaultdict[Path, list[str]] = defaultdict(list)
    complete = {f.global_step for f in run if f.global_step is not None and f.state in ("complete", "published")}
    newest = sorted(complete)[-policy.keep_newest :]
    best = {} if policy.keep_best is None else _best(run, policy.keep_best)
    for facts in run:
        step, why = facts.global_step, reasons[facts.location]
        if step in newest:
            why.append("the newest" if step == newest[-1] else f"among the newest {policy.keep_newest}")
        if step is not None and policy.keep_every is not None and step % policy.keep_every == 0:
            why.append(f"a multiple of {policy.keep_every} steps")
        if facts.location in best:
            why.append(best[facts.location])
        why.extend(f"pinned by {pattern}" for pattern in policy.pinned if facts.location.match(pattern))
    return reasons


def _best(run: Iterable[CheckpointFacts], best: KeepBest) -> Mapping[Path, str]:
    """Location → why the rule about the best keeps it. Ties go to the newer step.

    A step that is newer than all that were measured waits for its value, which an evaluation may bring later. A run
    without any value is kept whole: the name of the metric may be misspelt.
    """
    complete = [f for f in run if f.state in ("complete", "published") and f.global_step is not None]
    measured = [(f.metric, f.global_step, f) for f in complete if f.metric is not None and math.isfinite(f.metric)]
    if not measured:
        return {f.location: f"no step of this run has a value of {best.metric}" for f in complete}
    sign = 1.0 if best.mode == "min" else -1.0
    ranked = sorted(measured, key=lambda entry: (sign * entry[0], -(entry[1] or 0)))
    steps = list(dict.fromkeys(step for _, step, _ in ranked))[: best.count]
    kept = {f.location: f"among the best {best.count} by {best.metric} ({v:g})" for v, s, f in ranked if s in steps}
    last = max(step or 0 for _, step, _ in measured)
    waiting = {f.location: f"{best.metric} not measured yet" for f in complete if (f.global_step or 0) > last}
    return kept | waiting
