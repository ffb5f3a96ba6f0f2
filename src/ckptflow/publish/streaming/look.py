"""What is at the destination before the first byte is sent, and whether that is in the way."""

from __future__ import annotations

import hashlib
import logging
import time
from contextlib import closing

from ckptflow.convert import add_side_files
from ckptflow.engine.inorder import weight_file_bytes
from ckptflow.publish import refusals
from ckptflow.publish.before import names_of
from ckptflow.publish.model import MARKER_NAME, Marker, marker_in, publish_order
from ckptflow.publish.place import check_free, look_at
from ckptflow.publish.records import PublishedFile, PublishRecord
from ckptflow.publish.streaming.base import Streaming
from ckptflow.publish.streaming.target import StreamTarget
from ckptflow.publish.upload import make_room

_log = logging.getLogger(__name__)


def prepare_stream(streaming: Streaming) -> PublishRecord | None:
    """Look at the destination, refuse what would be refused at the end, and make room. Call it under ``claim_stream``.

    Returns:
        The record, where this model is published there already, file by file proven; None where there is work to do.

    Raises:
        UsageError: the destination isn't on S3, or the memory budget is too small for the parts.
        PermanentPublishError: the destination holds something else.
        TransientPublishError: the store failed in a way that may heal.
    """
    conversion = streaming.conversion
    side = add_side_files(conversion, [], conversion.side)
    with closing(streaming.open_target()) as target:
        target.check_sizes({file.name: weight_file_bytes(file) for file in streaming.files})
        place = look_at(target)
        marker = marker_in(place.marker_content)
        if marker is not None and marker.fingerprint == conversion.fingerprint:
            return _published_before(streaming, target, marker, place.marker_content or b"")
        mine = Marker(fingerprint=conversion.fingerprint, files={})
        check_free(target.uri, place, mine, names_of(conversion), overwrite=streaming.overwrite)
        if not streaming.overwrite:
            there = [streaming.local(name, **side[name]) for name in set(side) & set(place.listing)]
            differing = [file.name for file in there if target.prove_file(file) is None]
            if differing:
                raise refusals.foreign_files(target.uri, differing)
        if place.marker_content is not None:
            weights = {file.name for file in streaming.files}
            make_room(target, place.marker_content, sorted(weights & set(place.listing)))
    return None


def _published_before(
    streaming: Streaming, target: StreamTarget, marker: Marker, content: bytes
) -> PublishRecord | None:
    """The record of a model that is there, proven; where files are missing or damaged, the marker is taken away."""
    started = time.monotonic()
    files = []
    damaged = []
    for name in publish_order(marker.files):
        nbytes, sha256 = marker.files[name]
        streamed = streaming.state.streamed(name)
        if streamed is not None and streamed.record.sha256 == sha256:
            target.know(streamed)
        proof = target.prove_file(streaming.local(name, bytes=nbytes, sha256=sha256))
        if proof is None:
            damaged.append(name)
        else:
            files.append(PublishedFile(name=name, bytes=nbytes, sha256=sha256, verified_by=proof, outcome="skipped"))
    if damaged:
        _log.warning("%s: files are missing or damaged; they are made and sent again", target.uri)
        target.delete_file(MARKER_NAME)
        for name in damaged:
            target.delete_file(name)
        return None
    record = PublishedFile(
        name=MARKER_NAME,
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        verified_by="read back: same fingerprint",
        outcome="skipped",
    )
    return PublishRecord(
        uri=target.uri,
        state="published",
        already_published=True,
        fingerprint=marker.fingerprint,
        files=(*files, record),
        seconds=time.monotonic() - started,
    )
