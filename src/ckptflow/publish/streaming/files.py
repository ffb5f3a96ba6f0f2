"""One weight file on its way: is it there, is it that one, and else it is produced into the store."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing
from dataclasses import dataclass, replace

from ckptflow.engine.execute import Cancel
from ckptflow.engine.inorder import InOrder, stream_weight_file, weight_file_bytes
from ckptflow.engine.record import WeightFileRecord
from ckptflow.plan import WeightFile
from ckptflow.publish import refusals
from ckptflow.publish.fileprogress import FileProgress
from ckptflow.publish.streaming.base import Streaming
from ckptflow.publish.streaming.streamed import Streamed
from ckptflow.publish.streaming.target import StreamTarget
from ckptflow.publish.targets import Progress

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedFile:
    """A weight file that is at its destination, proven.

    Attributes:
        record: what was produced.
        outcome: ``sent``, or ``skipped`` where it was there already.
        verified_by: how the object was proven to be what was produced.
        seconds: wall time of the call.
    """

    record: WeightFileRecord
    outcome: str
    verified_by: str
    seconds: float


def stream_file(
    streaming: Streaming, number: int, progress: Progress | None = None, cancel: Cancel | None = None
) -> StreamedFile:
    """Produce weight file ``number`` (from 0) into the store, unless it is there and proven.

    Call it under ``claim_stream``. An object that no run of ours is known to have put is compared with what is
    produced, without sending it.

    Args:
        streaming: the model.
        number: which file.
        progress: called with bytes done since the last call; the sum is the size of the file.
        cancel: looked at a few times a second.

    Raises:
        ValueRefusedError: NaN or Inf, in the source or by the cast.
        SourceChangedError: a source file changed while it was read.
        OutputError: ``cancel`` was set.
        PermanentPublishError: the store refused, or holds another file of that name.
        TransientPublishError: the store failed in a way that may heal; run it again.
    """
    started = time.monotonic()
    with closing(streaming.open_target()) as target:
        if streaming.state.needs_md5:
            target.expect_no_checksums()
        work = _FileWork(streaming, target, streaming.files[number], progress, cancel)
        streamed, proof = work.run()
        if not target.gives_checksums:
            streaming.state.keep_md5_need()
    return StreamedFile(
        record=streamed.record,
        outcome=streamed.outcome,
        verified_by=proof,
        seconds=time.monotonic() - started,
    )


class _FileWork:
    """One call of ``stream_file``."""

    def __init__(
        self,
        streaming: Streaming,
        target: StreamTarget,
        file: WeightFile,
        progress: Progress | None,
        cancel: Cancel | None,
    ) -> None:
        self._streaming = streaming
        self._target = target
        self._file = file
        self._nbytes = weight_file_bytes(file)
        self._progress = FileProgress(self._nbytes, progress, threading.Lock())
        self._cancel = cancel

    def run(self) -> tuple[Streamed, str]:
        """The file at its destination, and its proof."""
        name, target = self._file.name, self._target
        found = self._proven_there()
        if found is not None:
            return found
        streamed = target.put_stream(
            name, self._nbytes, self._produce, self._streaming.state.memory(name), self._progress
        )
        if streamed is None:
            found = self._proven_there()
            if found is None:
                raise refusals.overtaken(target.uri, f"another {name}")
            theirs = replace(found[0], outcome="skipped")  # another run made the object, whoever sent its parts
            self._streaming.state.keep(theirs)
            return theirs, found[1]
        proof = target.prove_streamed(streamed)
        if proof is None:
            target.delete_file(name)
            raise refusals.not_held(target.uri, streamed.file)
        self._progress.finish()
        return streamed, proof

    def _proven_there(self) -> tuple[Streamed, str] | None:
        """What is there already; None where there is nothing, or nothing any more.

        Raises:
            PermanentPublishError: another file of that name, and overwriting was not asked for.
        """
        name, target, state = self._file.name, self._target, self._streaming.state
        facts = target.facts(name)
        if facts is None:
            return None
        streamed = state.streamed(name)
        if streamed is None and facts.bytes == self._nbytes:
            _log.info("%s: %s is there already; it is compared with what is produced", target.uri, name)
            streamed = target.digest_stream(name, self._nbytes, self._produce, facts)
        proof = None if streamed is None else target.prove_streamed(streamed)
        if streamed is not None and proof is not None:
            state.keep(streamed)
            target.tidy_file(name)
            self._progress.finish()
            return streamed, proof
        if not self._streaming.overwrite:
            raise refusals.foreign_files(target.uri, [name])
        target.delete_file(name)
        return None

    def _produce(self, stream: InOrder) -> WeightFileRecord:
        recorded = self._streaming.conversion.recorded
        return stream_weight_file(self._file, stream, self._streaming.engine_options, None, self._cancel, recorded)
