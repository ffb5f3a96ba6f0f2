"""What watch has in hand: complete checkpoints that are not known to be published, and when to look at each again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from ckptflow.discovery.watching import ReadyCheckpoint
from ckptflow.errors import UsageError
from ckptflow_flows.starting import Outcome, Runs, Starter, in_policy_order

logger = logging.getLogger(__name__)

# A turn takes at most this many checkpoints, so that new ones are not kept waiting by thousands of old ones.
TURN = 200
# The server stores events in batches, some seconds after it has accepted them.
ANNOUNCED_SECONDS = 10.0
BACKOFF_SECONDS, BACKOFF_LIMIT_SECONDS = 1.0, 60.0

Connect = Callable[[], AbstractContextManager[Runs]]
#: Told what became of a checkpoint whenever that changes.
Report = Callable[[Outcome], None]


@dataclass(slots=True, kw_only=True)
class Desk:
    """Checkpoints that are complete and not yet known to be published, and when to look at each again.

    Attributes:
        starter: what is made of them, and in which order.
        connect: opens the way to the runs.
        report: told about each change.
        away: errors of a server that is away and may come back.
    """

    starter: Starter
    connect: Connect
    report: Report
    away: tuple[type[Exception], ...]
    _open: dict[Path, ReadyCheckpoint] = field(default_factory=dict)
    _again_at: dict[Path, float] = field(default_factory=dict)
    _told: dict[Path, tuple[str, str]] = field(default_factory=dict)
    _unsure: dict[Path, tuple[ReadyCheckpoint, float]] = field(default_factory=dict)
    _announced: set[Path] = field(default_factory=set)
    _connection: ExitStack = field(default_factory=ExitStack)
    _runs: Runs | None = None
    _failures: int = 0
    _resume_at: float = 0.0

    def take(self, ready: Iterable[ReadyCheckpoint]) -> None:
        """Add checkpoints that became complete."""
        for checkpoint in ready:
            self._open[checkpoint.location.path] = checkpoint
            self._again_at.pop(checkpoint.location.path, None)

    def turn(self) -> None:
        """Do what is due now. Nothing is lost where the server is away: it stays due."""
        now = self.starter.clock()
        if now < self._resume_at:
            return
        due = [each for path, each in self._open.items() if self._again_at.get(path, 0.0) <= now]
        turn = in_policy_order(due, self.starter.policy)[:TURN]
        unsure = [each for each, when in self._unsure.values() if when <= now][:TURN]
        try:
            outcomes = self.starter.start_missing(turn, self._connected(), self._all_but(turn)) if turn else []
            sure = self._connected().make_sure_announced(unsure, self.starter.making) if unsure else set()
        except self.away as error:
            self._back_off(error)
            return
        if self._failures:
            logger.warning("back again; catching up with %d checkpoints", len(self._open))
        self._failures = 0
        for outcome in outcomes:
            self._note(outcome)
        for path in {each.location.path for each in turn} - {each.checkpoint.location.path for each in outcomes}:
            self._forget(path)  # it was deleted
            self._told.pop(path, None)
        for each in unsure:
            self._unsure[each.location.path] = (each, now + ANNOUNCED_SECONDS)
        for location in sure:
            self._unsure.pop(location.path, None)
            self._announced.add(location.path)

    def _all_but(self, turn: Iterable[ReadyCheckpoint]) -> list[ReadyCheckpoint]:
        paths = {each.location.path for each in turn}
        return [each for path, each in self._open.items() if path not in paths]

    def check_set_up(self) -> None:
        """Tell a person at once that there is nothing to start; a server that is away is waited for.

        Raises:
            UsageError: no server is named, or it has no such deployment.
        """
        try:
            self._connected()
        except UsageError:
            raise
        except self.away as error:
            self._back_off(error)

    def _connected(self) -> Runs:
        if self._runs is None:
            self._runs = self._connection.enter_context(self.connect())
        return self._runs

    def _back_off(self, error: Exception) -> None:
        self._connection.close()
        self._runs = None
        delay = min(BACKOFF_SECONDS * 2.0**self._failures, BACKOFF_LIMIT_SECONDS)
        self._failures += 1
        self._resume_at = self.starter.clock() + delay
        logger.warning("%s; trying again in %.0f s", error or type(error).__name__, delay)

    def _forget(self, path: Path) -> None:
        self._open.pop(path, None)
        self._again_at.pop(path, None)

    def _note(self, outcome: Outcome) -> None:
        path = outcome.checkpoint.location.path
        if outcome.has_run and path not in self._announced:
            later = self.starter.clock() + ANNOUNCED_SECONDS
            self._unsure.setdefault(path, (outcome.checkpoint, later))
        if outcome.again_at is None:
            self._forget(path)
        else:
            self._again_at[path] = outcome.again_at
        if self._told.get(path) != (outcome.state, outcome.detail):
            self._told[path] = (outcome.state, outcome.detail)
            self.report(outcome)
