"""look, ask and upload: is the model at a destination, would that take it, and how it gets there."""

from __future__ import annotations

from pathlib import Path

from prefect import get_run_logger

from ckptflow.cli.console import format_bytes
from ckptflow.conversion import recipe_of
from ckptflow.formats.base import Location
from ckptflow.publish.before import check_before_work
from ckptflow.publish.model import read_local_model
from ckptflow.publish.records import PublishRecord
from ckptflow.publish.several import Destination
from ckptflow.publish.status import is_published
from ckptflow.publish.upload import upload
from ckptflow.request import ConvertRequest
from ckptflow_tasks import artifacts
from ckptflow_tasks.limits import LIMITS
from ckptflow_tasks.planning import planned
from ckptflow_tasks.proving import Proven
from ckptflow_tasks.reading import Inspected
from ckptflow_tasks.step import step


@step("look", run_name="look for {label} at {place}", timeout_seconds=LIMITS.metadata_timeout_seconds)
def find_published(
    location: Location, destination: Destination, request: ConvertRequest, label: str, place: str
) -> bool:
    """Whether the model that this checkpoint makes by this recipe is at a destination already."""
    return is_published(location, destination.uri, destination.settings, recipe_of(request))


@step("ask", run_name="ask {place} about {label}", timeout_seconds=LIMITS.metadata_timeout_seconds)
def ask_destination(
    request: ConvertRequest, inspected: Inspected, destination: Destination, label: str, place: str
) -> None:
    """Refuse a destination that would not take the model in the end: before the work, and by the upload's own rule."""
    check_before_work(planned(request, inspected.fingerprint), destination)


@step("upload", run_name="upload {label} to {place}", timeout_seconds=LIMITS.upload_timeout_seconds)
def upload_model(proven: Proven, destination: Destination, label: str, place: str) -> PublishRecord:
    """Publish at one destination, read back, and show what is there."""
    directory = Path(proven.directory)
    progress = artifacts.ByteProgress("upload", read_local_model(directory).total_bytes)
    record = upload(
        directory,
        destination.uri,
        settings=destination.settings,
        progress=progress,
        overwrite=destination.overwrite,
    )
    progress.finish()
    show_published(record, label)
    get_run_logger().info("%s sent to %s", format_bytes(record.sent_bytes), record.uri)
    return record


def show_published(record: PublishRecord, label: str) -> None:
    """A link to the destination and a table of its files."""
    artifacts.link("upload", f"Where {label} was published", record.uri)
    rows = [
        {
            "file": file.name,
            "size": format_bytes(file.bytes),
            "outcome": file.outcome,
            "proven by": file.verified_by,
            "sha256": file.sha256,
        }
        for file in record.files
    ]
    artifacts.table("published-files", f"Files of {label} at {record.uri}", rows)
