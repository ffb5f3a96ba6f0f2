"""Starts post-training for complete checkpoints that are not published: the one way, for watch and sweep."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ckptflow.discovery.destinations import destination_of
from ckptflow.discovery.discover import by_step
from ckptflow.discovery.watching import ReadyCheckpoint
from ckptflow.errors import OutputError, PublishError, TransientPublishError
from ckptflow.formats.base import Location
from ckptflow.publish.several import Destination
from ckptflow.publish.status import is_published, is_published_at_all
from ckptflow_flows.decisions import Decision, LastRun, Making, Patience, decide
from ckptflow_flows.workplace import Workplace

logger = logging.getLogger(__name__)

Policy = Literal["newest-first", "in-order"]
#: Runs that wait for a worker at a time; the rest waits here, where the policy still has a say.
MAX_WAITING = 20
# A destination is asked about this many checkpoints at once; on S3 each is a request or two.
ASK_THREADS = 8
# Until a run's state is looked at again, in seconds, and until there may be room for another one.
RUNNING_SECONDS, ROOM_SECONDS = 15.0, 2.0
UNREADABLE_SECONDS = 60.0


class Runs(Protocol):
    """Where runs are started: a server, or this process."""

    def last_runs(self, locations: Sequence[Location], making: Making) -> Mapping[Location, LastRun]:
        """The newest try for each checkpoint; those without one are left out."""

    def waiting(self) -> int:
        """How many runs have not begun yet."""

    def start(self, checkpoint: ReadyCheckpoint, making: Making, attempt: int) -> str:
        """Start try number ``attempt``; gives a name for people."""

    def declare_lost(self, location: Location, making: Making, attempt: int) -> bool:
        """Give up a run that nobody began; False where somebody did so meanwhile."""

    def make_sure_announced(self, checkpoints: Sequence[ReadyCheckpoint], making: Making) -> set[Location]:
        """Those whose event is stored for good; the others are announced again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one checkpoint in one turn.

    Attributes:
        checkpoint: which one.
        state: ``published`` and ``left`` need no further look until files change.
        detail: for people.
        again_at: when to look again, in seconds since the epoch; None: never.
        has_run: there is a run for it, so that it was announced.
    """

    checkpoint: ReadyCheckpoint
    state: Literal["published", "started", "queued", "waiting", "left"]
    detail: str
    again_at: float | None = None
    has_run: bool = False


def in_policy_order(checkpoints: Iterable[ReadyCheckpoint], policy: Policy) -> list[ReadyCheckpoint]:
    """By global step; ``newest-first`` or ``in-order``."""
    of = {each.location: each for each in checkpoints}
    ordered = [of[found.location] for found in by_step(each.found for each in of.values())]
    return ordered[::-1] if policy == "newest-first" else ordered


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """Starts what is missing.

    Attributes:
        making: what is made of each checkpoint.
        policy: which checkpoint is first.
        patience: when to try again.
        max_waiting: most runs that wait for a worker at a time.
        clock: seconds since the epoch.
    """

    making: Making
    policy: Policy = "newest-first"
    patience: Patience = field(default_factory=Patience)
    max_waiting: int = MAX_WAITING
    clock: Callable[[], float] = time.time

    def start_missing(
        self, checkpoints: Iterable[ReadyCheckpoint], runs: Runs, others: Iterable[ReadyCheckpoint] = ()
    ) -> list[Outcome]:
        """Start a run for each checkpoint that needs one, first by policy, while there is room.

        Of checkpoints that go to one place, such as those of two runs of one name, one has a run at a time: whether the
        next one is the same model, or finds its place taken, shows before its work and not at its end.

        Args:
            checkpoints: those to look at.
            runs: where runs are started.
            others: checkpoints that are not due, of which some may be at work.

        Raises:
            Exception: of ``runs``, when the server is away. What was started before that is started; asking again
                does not start it twice.
        """
        ordered = in_policy_order((each for each in checkpoints if each.location.path.exists()), self.policy)
        looked_up = {each.location: answer for each, answer in zip(ordered, self._published(ordered), strict=True)}
        missing = [each for each in ordered if looked_up[each.location] is False]
        rivals = self._rivals(missing, others)
        asked = [each.location for each in missing] + rivals
        last = runs.last_runs(asked, self.making) if missing else {}
        at_work = {place: each for each in asked if _is_at_work(last.get(each)) for place in self._places(each)}
        decisions = {each.location: self._decide(each, last.get(each.location)) for each in missing}
        needs_room = any(decision.attempt for decision in decisions.values())
        room = self.max_waiting - runs.waiting() if needs_room else 0
        outcomes = [
            self._without_run(each, answer) for each in ordered if (answer := looked_up[each.location]) is not False
        ]
        for each in missing:
            decision, places = decisions[each.location], self._places(each.location)
            taken = next((place for place in places if at_work.get(place, each.location) != each.location), None)
            if decision.attempt and taken is not None:
                outcomes.append(self._behind(each, at_work[taken], taken))
                continue
            outcome = self._act(each, decision, runs, room)
            if outcome.state == "started":
                room -= 1
                at_work |= dict.fromkeys(places, each.location)
            outcomes.append(outcome)
        return outcomes

    def _places(self, location: Location) -> list[str]:
        return [destination_of(location, destination.uri) for destination in self.making.destinations]

    def _rivals(self, missing: Sequence[ReadyCheckpoint], others: Iterable[ReadyCheckpoint]) -> list[Location]:
        """Those of the others that go where one of the missing goes."""
        places = {place for each in missing for place in self._places(each.location)}
        return [each.location for each in others if places.intersection(self._places(each.location))]

    def _behind(self, checkpoint: ReadyCheckpoint, other: Location, place: str) -> Outcome:
        cure = "give each a destination of its own: {step} in it or, for two runs of one name, a watch for each root"
        detail = f"{other.path} is on its way to the same place, {place}; {cure}"
        again_at = self.clock() + RUNNING_SECONDS
        return Outcome(checkpoint=checkpoint, state="waiting", detail=detail, again_at=again_at)

    def _published(self, checkpoints: Sequence[ReadyCheckpoint]) -> list[bool | Exception]:
        """Whether each is published and its run through, or why its own files or the destinations don't tell."""
        away: dict[str, PublishError] = {}
        destinations = []
        for destination in (each.place() for each in self.making.destinations):
            try:
                destinations.append(destination.with_credentials_at_hand())
            except PublishError as error:
                away[destination.uri] = error
                destinations.append(destination)

        def ask_one(location: Location, destination: Destination) -> bool:
            if destination.uri in away:  # each further question would wait as long as the first one
                raise away[destination.uri]
            try:
                return is_published(location, destination.uri, destination.settings)
            except TransientPublishError as error:
                away[destination.uri] = error
                raise

        def ask(checkpoint: ReadyCheckpoint) -> bool | Exception:
            location = checkpoint.location
            try:
                if not is_published_at_all(location, destinations, ask_one):
                    return False
                # A run that was killed after the last upload has not said so, nor cleaned up.
                return not Workplace.of(self.making.machine, location).was_left()
            except (PublishError, OutputError, OSError) as error:
                return error

        with ThreadPoolExecutor(max_workers=ASK_THREADS) as pool:
            return list(pool.map(ask, checkpoints))

    def _without_run(self, checkpoint: ReadyCheckpoint, answer: bool | Exception) -> Outcome:
        if answer is True:
            return Outcome(checkpoint=checkpoint, state="published", detail="the model is at its destinations")
        again_at = self.clock() + UNREADABLE_SECONDS
        return Outcome(checkpoint=checkpoint, state="waiting", detail=f"can't be told: {answer}", again_at=again_at)

    def _decide(self, checkpoint: ReadyCheckpoint, last: LastRun | None) -> Decision:
        return decide(last, checkpoint.found.newest_mtime, self.patience, self.clock())

    def _act(self, checkpoint: ReadyCheckpoint, decision: Decision, runs: Runs, room: int) -> Outcome:
        now = self.clock()
        if decision.action == "leave":
            return Outcome(checkpoint=checkpoint, state="left", detail=decision.reason, has_run=True)
        if decision.action == "wait":
            return Outcome(
                checkpoint=checkpoint,
                state="waiting",
                detail=decision.reason,
                again_at=decision.again_at or now + RUNNING_SECONDS,
                has_run=True,
            )
        if decision.action == "declare-lost" and not runs.declare_lost(
            checkpoint.location, self.making, decision.attempt - 1
        ):
            detail = "a worker began the run after all"
            return Outcome(checkpoint=checkpoint, state="waiting", detail=detail, again_at=now + RUNNING_SECONDS)
        if room <= 0:
            detail = f"{self.max_waiting} runs wait for a worker already"
            return Outcome(checkpoint=checkpoint, state="queued", detail=detail, again_at=now + ROOM_SECONDS)
        name = runs.start(checkpoint, self.making, decision.attempt)
        logger.info("started %s for %s (%s)", name, checkpoint.location.path, decision.reason)
        return Outcome(
            checkpoint=checkpoint,
            state="started",
            detail=f"run {name}: {decision.reason}",
            again_at=self.clock() + RUNNING_SECONDS,
            has_run=True,
        )


def _is_at_work(last: LastRun | None) -> bool:
    return last is not None and last.ended in ("active", "pending")
