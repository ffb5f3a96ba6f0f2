"""prepare, stream, validate, upload: the steps of a model that goes to S3 without a local copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import get_run_logger, runtime

from ckptflow.cli.console import format_bytes
from ckptflow.engine.inorder import weight_file_bytes
from ckptflow.publish.records import PublishRecord
from ckptflow.publish.several import Destination
from ckptflow.publish.streaming import (
    StreamedFile,
    Streaming,
    prepare_stream,
    prove_stream,
    publish_stream,
    stream_file,
)
from ckptflow.request import ConvertRequest
from ckptflow.validate.stored import ForwardOptions
from ckptflow.validate.verify import VerifyOptions
from ckptflow_tasks import artifacts
from ckptflow_tasks.limits import LIMITS
from ckptflow_tasks.planning import planned
from ckptflow_tasks.proving import show_report
from ckptflow_tasks.publishing import show_published
from ckptflow_tasks.reading import Inspected
from ckptflow_tasks.step import GPU, step

Row = dict[str, Any]


def streaming_of(request: ConvertRequest, inspected: Inspected, destination: Destination) -> Streaming:
    """The model on its way to one destination, which is that of this model alone."""
    return Streaming(
        conversion=planned(request, inspected.fingerprint),
        uri=destination.uri,
        settings=destination.settings,
        overwrite=destination.overwrite,
    )


@step("prepare", run_name="prepare {place} for {label}", timeout_seconds=LIMITS.upload_timeout_seconds)
def prepare_destination(
    request: ConvertRequest, inspected: Inspected, destination: Destination, label: str, place: str
) -> PublishRecord | None:
    """Refuse a destination that holds something else; gives the record where it holds this very model."""
    record = prepare_stream(streaming_of(request, inspected, destination))
    if record is not None:
        show_published(record, label)
    return record


@step("stream", run_name="stream {label} to {place}", timeout_seconds=None, tags=(GPU,), retries=0)
def stream_files(
    request: ConvertRequest, inspected: Inspected, destination: Destination, label: str, place: str
) -> list[Row]:
    """Produce all weight files, one after the other; the limit on ``gpu`` is asked once for all, as in the merge."""
    numbers = range(len(inspected.weight_files))
    return [stream_weights(number, request, inspected, destination, label, place) for number in numbers]


def _stream_run_name() -> str:
    parameters = runtime.task_run.parameters
    position = parameters["inspected"].position(parameters["number"])
    return f"stream {parameters['label']} file {position} to {parameters['place']}"


@step("stream-file", run_name=_stream_run_name, timeout_seconds=LIMITS.upload_timeout_seconds)
def stream_weights(
    number: int, request: ConvertRequest, inspected: Inspected, destination: Destination, label: str, place: str
) -> Row:
    """Produce weight file ``number`` into the parts of an object, unless it is there and proven."""
    streaming = streaming_of(request, inspected, destination)
    progress = artifacts.ByteProgress(f"file {inspected.position(number)}", weight_file_bytes(streaming.files[number]))
    file = stream_file(streaming, number, progress)
    progress.finish()
    record = file.record
    get_run_logger().info("%s: %s, sha256 %s", record.name, format_bytes(record.nbytes), record.sha256)
    return _row(file)


def _row(file: StreamedFile) -> Row:
    record = file.record
    return {
        "file": record.name,
        "tensors": len(record.tensors),
        "size": format_bytes(record.nbytes),
        "MB/s": round(record.nbytes / max(file.seconds, 1e-6) / 1e6, 1),
        "seconds": round(file.seconds, 2),
        "outcome": file.outcome,
        "proven by": file.verified_by,
        "sha256": record.sha256,
    }


@step("validate", run_name="validate {label} at {place}", timeout_seconds=LIMITS.validate_timeout_seconds, tags=(GPU,))
def validate_stored(
    request: ConvertRequest,
    inspected: Inspected,
    destination: Destination,
    files: Sequence[Row],
    forward: bool,
    options: VerifyOptions,
    label: str,
    place: str,
) -> list[Row]:
    """Read the weight files back from the store, and compare every element with the source; hands the files on."""
    streaming = streaming_of(request, inspected, destination)
    report = prove_stream(streaming, options, forward=ForwardOptions() if forward else None)
    show_report(report, label)
    report.raise_if_failed()
    get_run_logger().info(
        "%d checks held; %s elements at %s equal torch's cast of the source",
        len(report.checks),
        f"{report.elements_compared:,}",
        place,
    )
    return list(files)


@step("upload", run_name="upload {label} to {place}", timeout_seconds=LIMITS.upload_timeout_seconds)
def upload_rest(
    request: ConvertRequest,
    inspected: Inspected,
    destination: Destination,
    files: Sequence[Row],
    label: str,
    place: str,
) -> PublishRecord:
    """Send config, tokenizer, index and record, and show what is there."""
    record = publish_stream(streaming_of(request, inspected, destination))
    artifacts.table("merge", f"Weight files of {label}", files)
    show_published(record, label)
    get_run_logger().info("%s sent to %s", format_bytes(record.sent_bytes), record.uri)
    return record
