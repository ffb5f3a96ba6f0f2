"""watch: a long-lived process that starts post-training as soon as a checkpoint is complete.

A plain process and not a flow: a flow run that lasts for months would end with the first restart of the server, while
this one waits until the server is back and catches up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException
from prefect.settings import get_current_settings

from ckptflow.discovery.watching import ReadyCheckpoint
from ckptflow.errors import UsageError
from ckptflow_flows.desk import Desk
from ckptflow_flows.serverruns import DEPLOYMENT, ServerRuns
from ckptflow_flows.starting import Runs

# What a server that is away looks like from here; one that lost its deployments may come back too.
AWAY = (httpx.HTTPError, PrefectException, UsageError, ConnectionError, TimeoutError)


@contextmanager
def server_runs(deployment: str = DEPLOYMENT) -> Iterator[Runs]:
    """Runs on the server that Prefect's settings name.

    Raises:
        UsageError: no server is named, or it has no such deployment.
        ConnectionError: it can't be reached.
    """
    if not get_current_settings().api.url:
        raise UsageError("no Prefect server is named", fix="set PREFECT_API_URL, or add --in-process")
    with ExitStack() as stack:
        try:
            client = stack.enter_context(get_client(sync_client=True))
        except RuntimeError as error:  # Prefect's way to say that nobody answers
            raise ConnectionError(str(error)) from error
        yield ServerRuns(client, deployment)


def watch_forever(batches: Iterator[list[ReadyCheckpoint]], desk: Desk) -> None:
    """Take what becomes complete and start what is due, until the process is told to end."""
    desk.check_set_up()
    for ready in batches:
        desk.take(ready)
        desk.turn()
