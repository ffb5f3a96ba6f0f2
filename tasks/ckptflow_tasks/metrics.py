"""read events: the metrics that trainers and evaluations told the server about single checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client

from ckptflow_tasks.limits import LIMITS
from ckptflow_tasks.step import step

PAGE = 50


@step("read events", run_name="read {metric} of {label}", timeout_seconds=LIMITS.metadata_timeout_seconds)
def read_metric_events(root: Path, metric: str, label: str) -> tuple[tuple[Path, float], ...]:
    """Checkpoint → value of a metric, from all events about checkpoints below the root, oldest first.

    Such an event has the resource ``ckptflow.checkpoint.PATH`` and a payload with ``metrics``, whatever its name is.
    """
    told = []
    with get_client(sync_client=True) as client:
        for event in _events_about(client, f"ckptflow.checkpoint.{os.path.abspath(root)}/"):
            path = event["resource"]["prefect.resource.id"].removeprefix("ckptflow.checkpoint.")
            metrics = event["payload"].get("metrics")
            value = metrics.get(metric) if isinstance(metrics, dict) else None
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                told.append((Path(path), float(value)))
    get_run_logger().info("%d values of %s came with events", len(told), metric)
    return tuple(told)


def _events_about(client: SyncPrefectClient, resource_prefix: str) -> Iterator[dict[str, Any]]:
    query = {
        "resource": {"id_prefix": [resource_prefix]},
        "occurred": {"since": "2000-01-01T00:00:00Z"},
        "order": "ASC",
    }
    response = client.request("POST", "/events/filter", json={"filter": query, "limit": PAGE})
    while True:
        response.raise_for_status()
        page = response.json()
        yield from page["events"]
        if not page.get("next_page"):
            return
        response = client.request("GET", "/events/filter/next", params={"page-token": _token(page["next_page"])})


def _token(next_page: str) -> str:
    # The server tells its own address, which behind a proxy is not the one that is reached from here.
    return parse_qs(urlsplit(next_page).query)["page-token"][0]
