"""The work directory of a streaming upload, and what becomes of it and of the destination in the end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from ckptflow.errors import CheckpointError, PublishError, ValueRefusedError, VerificationError
from ckptflow.files.locks import exclusive
from ckptflow.publish.model import MARKER_NAME
from ckptflow.publish.streaming.base import Streaming

_log = logging.getLogger(__name__)

#: The same bytes give them again: what was sent of such a model is taken away.
_REFUSALS = (CheckpointError, ValueRefusedError, VerificationError)


@contextmanager
def claim_stream(streaming: Streaming) -> Iterator[None]:
    """Hold the work directory against other runs; what was sent of a model that is refused is taken away.

    After a kill, or an error that may heal, digests of what was sent stay in the hidden directory for the next run.

    Raises:
        UsageError: the destination isn't on S3.
        OutputError: the work directory can't be written.
    """
    streaming.open_target().close()
    workspace = streaming.conversion.workspace
    made = [path for path in workspace.base.parents if not path.exists()]
    try:
        with exclusive(workspace.lock):
            workspace.prepare()
            try:
                yield
            except Exception as error:
                if _is_refusal(error):
                    _withdraw(streaming)
                if _is_refusal(error) or not any(workspace.records.iterdir()):
                    workspace.discard()
                raise
            workspace.discard()
    finally:
        for path in made:
            with suppress(OSError):  # not empty: something is left for the next run, or others work there
                path.rmdir()


def _is_refusal(error: Exception) -> bool:
    cause = error.__cause__
    is_unreadable = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    return isinstance(error, _REFUSALS) and not is_unreadable  # a network file system that hiccups may heal


def _withdraw(streaming: Streaming) -> None:
    """Delete the weight files that were sent, unless another run has published the model meanwhile."""
    try:
        with closing(streaming.open_target()) as target:
            if target.read_file(MARKER_NAME) is not None:
                return
            for file in streaming.files:
                upload_id = streaming.state.memory(file.name).upload_id
                if upload_id is not None:
                    target.abort(file.name, upload_id)
                streamed = streaming.state.streamed(file.name)
                if streamed is not None and streamed.outcome == "sent":
                    target.delete_file(file.name)
    except PublishError as error:  # the refusal is what a person should read
        _log.warning("%s: files of a refused model are left there (%s)", streaming.uri, error.what)
