"""The runs of post-training on a Prefect server: which there were, and how to start one.

Everything here is a request that raises when the server is away: an event or a run that only seemed to be sent would
be a lost checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TypeVar
from uuid import NAMESPACE_URL, UUID, uuid5

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterIdempotencyKey,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.events.schemas.events import Event, Resource
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from ckptflow.discovery.watching import ReadyCheckpoint
from ckptflow.errors import UsageError
from ckptflow.formats.base import Location
from ckptflow_flows.decisions import Ended, LastRun, Making, attempt_key, base_key

DEPLOYMENT = "post-training/post-training"
READY_EVENT = "ckptflow.checkpoint.ready"
#: Label of the event's resource: who noticed. The watcher starts the run itself, others count on the automation.
ANNOUNCED_BY = "ckptflow.announced-by"
# The server gives at most so many runs, and events, at a time.
BATCH, EVENT_BATCH = 200, 50

T = TypeVar("T")

_ENDED: dict[StateType, Ended] = {
    StateType.PENDING: "pending",
    StateType.COMPLETED: "completed",
    StateType.FAILED: "failed",
    StateType.CRASHED: "crashed",
    StateType.CANCELLED: "cancelled",
}


class ServerRuns:
    """Runs of one deployment.

    Args:
        client: inside its context.
        deployment: ``FLOW/NAME``.

    Raises:
        UsageError: there is no such deployment.
    """

    def __init__(self, client: SyncPrefectClient, deployment: str = DEPLOYMENT) -> None:
        self._client = client
        self._runs: dict[str, FlowRun] = {}
        try:
            self._deployment_id: UUID = client.read_deployment_by_name(deployment).id
        except ObjectNotFound as error:
            raise UsageError(
                "the Prefect server has no such deployment",
                expected=deployment,
                fix="run `ckptflow deploy`, or add --in-process",
            ) from error

    def last_runs(self, locations: Sequence[Location], making: Making) -> Mapping[Location, LastRun]:
        """The newest try for each checkpoint; those without one are left out."""
        last: dict[Location, LastRun] = {}
        open_ones, attempt = list(locations), 1
        while open_ones:
            keys = {attempt_key(base_key(location, making), attempt): location for location in open_ones}
            runs = {run.idempotency_key: run for run in self._read(list(keys))}
            self._runs.update({key: run for key, run in runs.items() if key is not None})
            last.update({keys[key]: _last_run(run, attempt) for key, run in runs.items() if key is not None})
            open_ones = [location for key, location in keys.items() if key in runs]
            attempt += 1
        return last

    def _read(self, keys: Sequence[str]) -> list[FlowRun]:
        runs: list[FlowRun] = []
        for batch in batched(keys, BATCH):
            wanted = FlowRunFilterIdempotencyKey(any_=list(batch))
            runs += self._client.read_flow_runs(flow_run_filter=FlowRunFilter(idempotency_key=wanted), limit=BATCH)
        return runs

    def waiting(self) -> int:
        """How many runs of the deployment have not begun yet."""
        types = FlowRunFilterStateType(any_=[StateType.SCHEDULED, StateType.PENDING])
        return self._client.count_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[self._deployment_id])),
            flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=types)),
        )

    def start(self, checkpoint: ReadyCheckpoint, making: Making, attempt: int) -> str:
        """Make the run for try number ``attempt``, unless somebody else did so meanwhile; gives its name."""
        location = checkpoint.location
        key = attempt_key(base_key(location, making), attempt)
        if attempt == 1:
            # First the event: a kill between the two repeats it under the same id, which the server takes once.
            self._announce(checkpoint, key)
        parameters = {"checkpoint": making.parameters(location).model_dump(mode="json")}
        run = self._client.create_flow_run_from_deployment(
            self._deployment_id, parameters=parameters, idempotency_key=key
        )
        return run.name

    def declare_lost(self, location: Location, making: Making, attempt: int) -> bool:
        """Mark a pending run as crashed; False where it began meanwhile."""
        run = self._runs[attempt_key(base_key(location, making), attempt)]
        if self._client.read_flow_run(run.id).state_type != StateType.PENDING:
            return False
        message = "No process took this run up: the worker that was to start it died."
        self._client.set_flow_run_state(run.id, Crashed(message=message), force=True)
        return True

    def make_sure_announced(self, checkpoints: Sequence[ReadyCheckpoint], making: Making) -> set[Location]:
        """Those whose event is stored. A server that is killed loses what it has accepted a few seconds before."""
        of = {event_id(base_key(each.location, making)): each for each in checkpoints}
        stored: set[UUID] = set()
        for batch in batched(list(of), EVENT_BATCH):
            query = {"id": {"id": [str(each) for each in batch]}, "occurred": {"since": "2000-01-01T00:00:00Z"}}
            response = self._client.request("POST", "/events/filter", json={"filter": query, "limit": EVENT_BATCH})
            response.raise_for_status()
            stored |= {UUID(event["id"]) for event in response.json()["events"]}
        for each in of.keys() - stored:
            self._announce(of[each], base_key(of[each].location, making))
        return {of[each].location for each in stored & of.keys()}

    def _announce(self, checkpoint: ReadyCheckpoint, key: str) -> None:
        event = ready_event(checkpoint, announced_by="watch", key=key)
        response = self._client.request("POST", "/events", json=[event.model_dump(mode="json")])
        response.raise_for_status()


def batched(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Slices of at most ``size``."""
    return (items[begin : begin + size] for begin in range(0, len(items), size))


def event_id(key: str) -> UUID:
    """The same for the same checkpoint and recipe: the server stores an event once."""
    return uuid5(NAMESPACE_URL, f"ckptflow:{key}")


def ready_event(checkpoint: ReadyCheckpoint, *, announced_by: str, key: str) -> Event:
    """``ckptflow.checkpoint.ready``; the same key gives the same event, which the server stores once."""
    location = checkpoint.location
    return Event(
        id=event_id(key),
        event=READY_EVENT,
        resource=Resource(
            {
                "prefect.resource.id": f"ckptflow.checkpoint.{location.path}",
                "prefect.resource.name": str(location.path),
                ANNOUNCED_BY: announced_by,
            }
        ),
        payload={
            "path": str(location.path),
            "global_step": location.global_step,
            "layout": location.layout,
            "role": location.role,
            "bytes": checkpoint.nbytes,
        },
    )


def _last_run(run: FlowRun, attempt: int) -> LastRun:
    state = run.state
    ended: Ended = "active" if state is None else _ENDED.get(state.type, "active")
    if ended == "failed" and state is not None and state.name == "Refused":
        ended = "refused"
    started = run.start_time or run.created
    since = started if state is None else state.timestamp
    return LastRun(
        attempt=attempt,
        ended=ended,
        started_at=_seconds(started),
        since=_seconds(since),
        message="" if state is None else state.message or "",
    )


def _seconds(moment: datetime | None) -> float:
    return 0.0 if moment is None else moment.timestamp()
