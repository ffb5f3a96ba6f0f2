"""The proof over what is in the store, and all that follows it: other files, index, record."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptflow.convert import write_all_but_weights
from ckptflow.errors import OutputError
from ckptflow.files.kinds import RECORD_NAME
from ckptflow.publish import refusals
from ckptflow.publish.model import LocalModel, parse_marker, publish_order
from ckptflow.publish.records import PublishRecord
from ckptflow.publish.streaming.base import Streaming
from ckptflow.publish.streaming.streamed import Streamed
from ckptflow.publish.streaming.target import StreamTarget
from ckptflow.publish.targets import Progress
from ckptflow.publish.upload import publish
from ckptflow.validate.stored import ForwardOptions, verify_stored
from ckptflow.validate.storedbytes import StoredFile

if TYPE_CHECKING:
    from ckptflow.validate.report import ValidationReport
    from ckptflow.validate.verify import VerifyOptions


def prove_stream(
    streaming: Streaming,
    options: VerifyOptions | None = None,
    *,
    forward: ForwardOptions | None = None,
    progress: Progress | None = None,
) -> ValidationReport:
    """The checks of ``verify`` against the checkpoint, over the objects at the destination, read by ranges.

    Call it under ``claim_stream``, after the last file. The report's ``raise_if_failed`` turns failures into an error.

    Args:
        streaming: the model.
        options: limits.
        forward: load the model and run it, where it may be fetched for that; None leaves it out.
        progress: told the bytes as they are read back, and those of the checkpoint whose checksums are looked at.

    Raises:
        OutputError: a weight file was not streamed.
        SourceChangedError: the checkpoint changed since it was planned.
        PublishError: the store failed, or an object is gone.
    """
    conversion = streaming.conversion
    all_streamed = streaming.all_streamed()
    write_all_but_weights(conversion, [streamed.record for streamed in all_streamed])
    with closing(streaming.open_target()) as target:
        return verify_stored(
            conversion.workspace.model,
            [_stored(target, streamed) for streamed in all_streamed],
            against=conversion.request.path,
            forward=forward,
            options=options,
            progress=progress,
        )


def _stored(target: StreamTarget, streamed: Streamed) -> StoredFile:
    name = streamed.record.name
    facts = target.facts(name)
    if facts is None:
        raise refusals.disturbed(target.uri, f"no {name}, which was there a moment ago")

    def read(offset: int, length: int) -> bytes:
        return target.read_range(name, facts, offset, length)

    return StoredFile(name=name, nbytes=facts.bytes, read=read)


def publish_stream(streaming: Streaming, progress: Progress | None = None) -> PublishRecord:
    """Send all but the weight files, the marker last. Call it under ``claim_stream``, after the proof has held.

    Args:
        streaming: the model.
        progress: called with bytes done since the last call; the sum is ``total_bytes`` of the record.

    Raises:
        OutputError: a weight file was not streamed, or nothing was proven.
        CkptflowError: as ``upload``.
    """
    workspace = streaming.conversion.workspace
    all_streamed = {streamed.record.name: streamed for streamed in streaming.all_streamed()}
    try:
        content = (workspace.model / RECORD_NAME).read_bytes()
    except FileNotFoundError as error:
        raise OutputError(
            "the model was not proven", file=workspace.model / RECORD_NAME, fix="prove it first, then publish it"
        ) from error
    marker = parse_marker(content)
    files = tuple(
        streaming.local(name, bytes=marker.files[name][0], sha256=marker.files[name][1])
        for name in publish_order(marker.files)
    )
    model = LocalModel(directory=workspace.model, marker=marker, marker_content=content, files=files)
    with closing(streaming.open_target()) as target:
        for streamed in all_streamed.values():
            target.know(streamed)
        record = publish(model, target, progress=progress, overwrite=streaming.overwrite)
    if record.already_published:
        return record
    told = tuple(
        replace(f, outcome=all_streamed[f.name].outcome) if f.name in all_streamed else f for f in record.files
    )
    return replace(record, files=told)
