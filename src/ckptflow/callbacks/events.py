"""The event that says that a checkpoint is complete, as Prefect's API takes it, without Prefect."""

from __future__ import annotations

import base64
import json
import os
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid5

from ckptflow.discovery.discover import FoundCheckpoint
from ckptflow.discovery.signatures import bytes_below

READY_EVENT = "ckptflow.checkpoint.ready"
TIMEOUT_SECONDS = 5.0


def ready_event(
    found: FoundCheckpoint, global_step: int | None, metrics: Mapping[str, float], *, key: UUID
) -> dict[str, Any]:
    """What the watcher sends of the same checkpoint, said by its trainer.

    Args:
        found: a complete checkpoint.
        global_step: as the trainer counts; None takes what the checkpoint says of itself.
        metrics: of the trainer, such as its loss.
        key: of the announcement; the event's id is the same each time that it is tried.
    """
    location = found.location
    payload: dict[str, Any] = {
        "path": str(location.path),
        "global_step": location.global_step if global_step is None else global_step,
        "layout": location.layout,
        "role": location.role,
        "bytes": bytes_below(location.path),
    }
    if metrics:
        payload["metrics"] = dict(metrics)
    return {
        "id": str(uuid5(key, str(location.path))),
        "occurred": datetime.now(UTC).isoformat(),
        "event": READY_EVENT,
        "resource": {
            "prefect.resource.id": f"ckptflow.checkpoint.{location.path}",
            "prefect.resource.name": str(location.path),
            "ckptflow.announced-by": "trainer",
        },
        "related": [],
        "payload": payload,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefectApi:
    """Where events go.

    Attributes:
        url: of the API, such as ``http://127.0.0.1:4200/api``.
        headers: with credentials; never shown.
    """

    url: str
    headers: Mapping[str, str] = field(repr=False, default_factory=dict)

    @classmethod
    def from_environment(cls) -> PrefectApi | None:
        """As Prefect's own client reads the environment; None where no server is named."""
        url = os.environ.get("PREFECT_API_URL")
        if not url:
            return None
        headers = {"Content-Type": "application/json"}
        key, secret = os.environ.get("PREFECT_API_KEY"), os.environ.get("PREFECT_API_AUTH_STRING")
        if secret:
            headers["Authorization"] = f"Basic {base64.b64encode(secret.encode()).decode()}"
        elif key:
            headers["Authorization"] = f"Bearer {key}"
        headers.update(json.loads(os.environ.get("PREFECT_CLIENT_CUSTOM_HEADERS") or "{}"))
        return cls(url=url.rstrip("/"), headers=headers)

    def send(self, events: list[dict[str, Any]]) -> None:
        """Hand events to the server, which stores each id once.

        Raises:
            OSError: it is away, or refused them.
        """
        body = json.dumps(events, allow_nan=False).encode()
        request = urllib.request.Request(f"{self.url}/events", data=body, headers=dict(self.headers), method="POST")
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            response.read()
