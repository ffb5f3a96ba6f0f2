"""``ckptflow run``: the post-training flow in this process, for one checkpoint or all complete ones under a root."""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ckptflow.discovery.discover import FoundCheckpoint, by_step, discover, judge
from ckptflow.errors import AmbiguousCheckpointError
from ckptflow.formats.base import Location
from ckptflow.formats.registry import locate
from ckptflow_flows.decisions import Making
from ckptflow_flows.making import making_from
from ckptflow_flows.telling import server_told, settings_told

# Prefect reads these when it is imported. Its own server, started where none is configured, gets the time that a
# slow disk needs for the first migration, and neither side calls home.
PREFECT_DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # A run that is killed is missed soon, by a server that `ckptflow deploy` has set up.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "ckptflow,ckptflow_tasks",
    # The library logs from threads of its own too, which belong to no run.
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one checkpoint.

    Attributes:
        path: the checkpoint.
        global_step: its step, if it tells.
        state: ``published``, ``refused``, ``failed``, or ``waiting`` for one that is not complete.
        detail: the URI, or the reason.
    """

    path: str
    global_step: int | None
    state: str
    detail: str

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def run_checkpoints(args: argparse.Namespace) -> Iterator[Outcome]:
    """Run the flow for each complete checkpoint at or below ``args.path``, oldest step first; yields each as it ends.

    Raises:
        NotACheckpointError: nothing is there.
        UsageError: a destination is not one, or is named twice, or a variable holds what it can't.
        CkptflowError: the Prefect server is away.
    """
    making = making_from(args)
    for name, value in PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    # Prefect's own console handler names run and task; it stands back where there is one already.
    logging.getLogger().handlers.clear()
    with settings_told(), server_told():
        for found in _checkpoints(args):
            yield _run_one(found, making)


def _checkpoints(args: argparse.Namespace) -> Iterator[FoundCheckpoint]:
    try:
        location: Location | None = locate(args.path)
    except AmbiguousCheckpointError:
        location = None
    if location is None:
        yield from by_step(discover([args.path], settle_seconds=args.settle))
        return
    found = judge(location, args.settle, time.time())
    if found is not None:
        yield found


def _run_one(found: FoundCheckpoint, making: Making) -> Outcome:
    location = found.location
    path, step = str(location.path), location.global_step
    if found.state != "complete":
        return Outcome(path=path, global_step=step, state="waiting", detail=f"{found.state}: {found.reason}")
    from ckptflow_flows.inprocess import run_here

    state = run_here(location, making)
    kind = "published" if state.is_completed() else "refused" if state.name == "Refused" else "failed"
    return Outcome(path=path, global_step=step, state=kind, detail=state.message or state.name or "")
