"""The whole work in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ckptflow.convert import check_replicas
from ckptflow.files.locks import in_use
from ckptflow.publish.records import PublishRecord
from ckptflow.publish.streaming.base import Streaming
from ckptflow.publish.streaming.claim import claim_stream
from ckptflow.publish.streaming.files import stream_file
from ckptflow.publish.streaming.finish import prove_stream, publish_stream
from ckptflow.publish.streaming.look import prepare_stream
from ckptflow.validate.stored import ForwardOptions

if TYPE_CHECKING:
    from ckptflow.validate.report import ValidationReport
    from ckptflow.validate.verify import VerifyOptions


def stream(
    streaming: Streaming,
    *,
    options: VerifyOptions | None = None,
    forward: ForwardOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[PublishRecord, ValidationReport | None]:
    """The whole work in this process. Safe to kill and to run again, and to run twice at once.

    Args:
        streaming: the model and where it goes.
        options: limits of the proof.
        forward: load the model and run it, where it may be fetched for that; None leaves it out.
        progress: told the bytes of weight files as they are sent.

    Returns:
        What was published, and the report of the proof; None where the model was there already.

    Raises:
        VerificationError: the proof failed; what was sent was taken away again.
        CkptflowError: as ``prepare_stream``, ``stream_file``, ``prove_stream`` and ``publish_stream``.
    """
    with in_use(streaming.conversion.location.path), claim_stream(streaming):
        published = prepare_stream(streaming)
        if published is not None:
            return published, None
        check_replicas(streaming.conversion)
        for number in range(len(streaming.files)):
            stream_file(streaming, number, progress)
        report = prove_stream(streaming, options, forward=forward)
        report.raise_if_failed()
        return publish_stream(streaming), report
