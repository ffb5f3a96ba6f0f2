"""Each run writes itself into the lock file that it holds; the next one tells the server what died of it.

A process that was killed says nothing, and a run without a worker would be Running for ever.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from uuid import UUID

import httpx
from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.states import Crashed

logger = logging.getLogger(__name__)


def take_over(lock: Path) -> None:
    """Note this flow run in a lock file that it holds; the run that is noted there is over, however it ended."""
    this = UUID(str(runtime.flow_run.id))
    before = _noted(lock)
    with suppress(OSError):  # a full disk is told by whoever needs it for more than this
        lock.write_text(str(this), "ascii")
    if before is not None and before != this:
        _declare_over(before)


def _noted(lock: Path) -> UUID | None:
    try:
        return UUID(lock.read_text("ascii"))
    except (OSError, ValueError):  # nobody, or a note that was cut short
        return None


def _declare_over(run: UUID) -> None:
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(run).state
            if state is not None and not state.is_final():
                client.set_flow_run_state(run, Crashed(message="Its process died; another run took its place."))
    except ObjectNotFound:
        pass  # of another server, or deleted
    except (httpx.HTTPError, PrefectException, RuntimeError) as error:
        logger.warning("can't tell the server that run %s died: %s", run, error)
