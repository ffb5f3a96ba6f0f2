"""announce: the event that a model is published, for others to hang their work on."""

from __future__ import annotations

from uuid import NAMESPACE_URL, UUID, uuid5

import httpx
from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.events.schemas.events import Event, RelatedResource, Resource

from ckptflow.errors import TransientPublishError
from ckptflow.formats.base import Location
from ckptflow.publish.records import PublishedModel, PublishRecord
from ckptflow.publish.several import Destination
from ckptflow.publish.status import published_model
from ckptflow_tasks.limits import LIMITS
from ckptflow_tasks.step import step

PUBLISHED_EVENT = "ckptflow.checkpoint.published"
#: Label of the event's resource, for automations that are about one destination.
DESTINATION = "ckptflow.destination"


@step("announce", run_name="announce {label} at {place}", timeout_seconds=LIMITS.metadata_timeout_seconds)
def announce_published(
    destination: Destination, record: PublishRecord | None, location: Location, label: str, place: str
) -> None:
    """Tell the server that the model is at a destination, proven. It stores the event once, however often it is told.

    Args:
        destination: the model's own place.
        record: of the upload; None where a run before this one made it, and what is there has to be read.
        location: the checkpoint.
        label: of the checkpoint.
        place: the destination that may hold many models.

    Raises:
        TransientPublishError: the server did not take it.
    """
    model = published_model(destination) if record is None else record.model
    if model is None:
        return  # taken away since it was seen
    event = published_event(model, location).model_dump(mode="json")
    # As a request, and not by emit_event, which loses what it can't send, and does not say so.
    with get_client(sync_client=True) as client:
        try:
            client.request("POST", "/events", json=[event]).raise_for_status()
        except httpx.HTTPError as error:
            raise TransientPublishError(
                "the model is published, but the Prefect server did not take the event that says so",
                file=model.uri,
                found=str(error),
            ) from error


def published_event(model: PublishedModel, location: Location) -> Event:
    """``ckptflow.checkpoint.published``; the same model at the same destination gives the same id."""
    return Event(
        id=event_id(model.uri, model.fingerprint),
        event=PUBLISHED_EVENT,
        resource=Resource(
            {
                "prefect.resource.id": f"ckptflow.checkpoint.{location.path}",
                "prefect.resource.name": str(location.path),
                DESTINATION: model.uri,
            }
        ),
        related=_flow_run(),
        payload={
            "path": str(location.path),
            "global_step": location.global_step,
            "layout": location.layout,
            "role": location.role,
            "destination": model.uri,
            "revision": model.revision,
            "fingerprint": model.fingerprint,
            "bytes": model.bytes,
            "files": model.files,
        },
    )


def event_id(uri: str, fingerprint: str) -> UUID:
    """The same for the same model at the same destination."""
    return uuid5(NAMESPACE_URL, f"ckptflow:published:{fingerprint}:{uri}")


def _flow_run() -> list[RelatedResource]:
    resource = {
        "prefect.resource.id": f"prefect.flow-run.{runtime.flow_run.id}",
        "prefect.resource.role": "flow-run",
        "prefect.resource.name": str(runtime.flow_run.name),
    }
    return [RelatedResource(resource)]
