"""Runs of post-training in this very process, one after the other, for watching without workers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from prefect import tags

from ckptflow.discovery.watching import ReadyCheckpoint
from ckptflow.formats.base import Location
from ckptflow_flows.automations import TAG
from ckptflow_flows.decisions import Ended, LastRun, Making
from ckptflow_flows.post_training import post_training

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State


def run_here(location: Location, making: Making) -> State[Any]:
    """The whole flow in this process; the server that it is told to misses it when the process dies."""
    with tags(TAG):
        # The flow is synchronous; its call is typed as if it could be awaited too.
        return cast("State[Any]", post_training(making.parameters(location), return_state=True))


class InProcessRuns:
    """Remembers how its runs ended; a restart begins anew, from what is at the destination."""

    def __init__(self) -> None:
        self._last: dict[Location, LastRun] = {}

    def last_runs(self, locations: Sequence[Location], making: Making) -> Mapping[Location, LastRun]:
        """How the newest run for each ended."""
        return {location: self._last[location] for location in locations if location in self._last}

    def waiting(self) -> int:
        """None: ``start`` returns when the run has ended."""
        return 0

    def start(self, checkpoint: ReadyCheckpoint, making: Making, attempt: int) -> str:
        """Run the whole flow, now."""
        started = time.time()
        state = run_here(checkpoint.location, making)
        self._last[checkpoint.location] = LastRun(
            attempt=attempt,
            ended=_ended(state),
            started_at=started,
            since=time.time(),
            message=state.message or "",
        )
        return state.message or str(state.name)

    def declare_lost(self, location: Location, making: Making, attempt: int) -> bool:
        """Nothing waits in this process."""
        return False

    def make_sure_announced(self, checkpoints: Sequence[ReadyCheckpoint], making: Making) -> set[Location]:
        """Nobody is told of what this process does itself."""
        return {checkpoint.location for checkpoint in checkpoints}


def _ended(state: State[Any]) -> Ended:
    if state.is_completed():
        return "completed"
    if state.name == "Refused":
        return "refused"
    return "crashed" if state.is_crashed() else "failed"
