"""sweep: finds complete checkpoints that are not published and starts post-training for each, as a run of its own.

Scheduled, and started by events of trainers that announce a checkpoint themselves. It is cheap and can run at any
time, as often as one likes: what watch or another sweep has started is not started again.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.states import Completed
from pydantic import Field

from ckptflow.discovery.destinations import run_name
from ckptflow.discovery.discover import SETTLE_SECONDS, by_step, discover
from ckptflow.discovery.signatures import bytes_below
from ckptflow.discovery.watching import ReadyCheckpoint
from ckptflow.errors import UsageError
from ckptflow_flows.decisions import Making, Patience
from ckptflow_flows.serverruns import DEPLOYMENT, ServerRuns
from ckptflow_flows.settings import Destinations, Machine, Recipe, Validation, destinations_of
from ckptflow_flows.starting import MAX_WAITING, Outcome, Policy, Starter
from ckptflow_tasks import artifacts

logger = logging.getLogger(__name__)

Roots = Annotated[
    list[Path] | str,
    Field(title="Roots", description=f"Directories that hold runs; as one text they are separated by `{os.pathsep}`."),
]
# A table of more rows is no help to anybody.
MAX_ROWS = 500


# Tried again, since a server that is busy for a moment would let the checkpoint wait until the next scheduled sweep.
@flow(
    name="sweep",
    flow_run_name="sweep",
    retries=2,
    retry_delay_seconds=10,
    persist_result=False,
    validate_parameters=True,
)
def sweep(
    roots: Roots,
    destinations: Destinations,
    recipe: Recipe = Recipe(),  # noqa: B008 - frozen
    machine: Machine = Machine(),  # noqa: B008
    validation: Validation = Validation(),  # noqa: B008
    policy: Policy = "newest-first",
    patience: Patience = Patience(),  # noqa: B008
    settle_seconds: float = SETTLE_SECONDS,
    max_waiting: int = MAX_WAITING,
    deployment: str = DEPLOYMENT,
) -> Any:
    """Start post-training for each complete checkpoint under the roots that is not published.

    Args:
        roots: directories that hold runs.
        destinations: where models are published; a checkpoint is, when its model is at all of them.
        recipe: what to make of each checkpoint.
        machine: how to run.
        validation: how results are proven.
        policy: which checkpoint is first.
        patience: when a run is given up, and when it is tried again.
        settle_seconds: time without a change before a checkpoint counts as complete.
        max_waiting: most runs that wait for a worker at a time.
        deployment: of post-training.
    """
    making = Making(destinations=destinations_of(destinations), recipe=recipe, machine=machine, validation=validation)
    starter = Starter(making=making, policy=policy, patience=patience, max_waiting=max_waiting)
    found = complete_checkpoints(roots_of(roots), settle_seconds)
    with get_client(sync_client=True) as client:
        outcomes = starter.start_missing(found, ServerRuns(client, deployment))
    _show(outcomes)
    return _state(outcomes)


def roots_of(roots: list[Path] | str) -> list[Path]:
    """The directories that ``roots`` names; one that is not there, such as an unmounted disk, does not stop the others.

    Raises:
        UsageError: none is named.
    """
    named = [Path(root) for root in (roots.split(os.pathsep) if isinstance(roots, str) else roots) if str(root)]
    if not named:
        raise UsageError("no directories to look at", fix="set CKPTFLOW_ROOTS and deploy again, or name roots")
    for root in named:
        if not root.exists():
            logger.warning("%s is not there", root)
    return [root for root in named if root.exists()]


def complete_checkpoints(roots: Sequence[Path], settle_seconds: float) -> Iterator[ReadyCheckpoint]:
    """All complete checkpoints under the roots, with their bytes."""
    for found in discover(roots, settle_seconds=settle_seconds, now=time.time()):
        if found.state == "complete":
            yield ReadyCheckpoint(found=found, nbytes=bytes_below(found.location.path))


def _show(outcomes: Sequence[Outcome]) -> None:
    unpublished = [outcome for outcome in outcomes if outcome.state != "published"]
    by_path = {str(outcome.checkpoint.location.path): outcome for outcome in unpublished}
    ordered = by_step(outcome.checkpoint.found for outcome in unpublished)
    rows = [
        {
            "run": run_name(found.location),
            "step": found.location.global_step,
            "state": outcome.state,
            "why": outcome.detail,
            "path": str(found.location.path),
        }
        for found in ordered[:MAX_ROWS]
        for outcome in (by_path[str(found.location.path)],)
    ]
    if rows:
        artifacts.table("sweep", "Complete checkpoints that are not published", rows)


def _state(outcomes: Sequence[Outcome]) -> State[Any]:
    counts = Counter(outcome.state for outcome in outcomes)
    message = ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "no complete checkpoints"
    get_run_logger().info(message)
    return Completed(message=message)
