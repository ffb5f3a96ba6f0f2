"""Sending a file to S3 while it is produced: it never lies on a local disk, and its sha256 is known at the end only."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from ckptflow.engine.record import WeightFileRecord
from ckptflow.errors import PublishError, TransientPublishError, UsageError
from ckptflow.publish.digests import DigestName, ObjectDigest, PartDigest, digest_object, digest_part
from ckptflow.publish.fileprogress import FileProgress
from ckptflow.publish.model import LocalFile
from ckptflow.publish.parts import PartPlan, plan_parts
from ckptflow.publish.s3 import S3Target
from ckptflow.publish.s3_multipart import (
    MultipartSender,
    OpenUpload,
    UploadGoneError,
    abort_upload,
    is_equal,
    object_metadata,
)
from ckptflow.publish.s3_proof import ObjectFacts
from ckptflow.publish.settings import PublishSettings
from ckptflow.publish.streaming.parts import PartStream, fit_parts
from ckptflow.publish.streaming.streamed import Memory, Produce, Streamed

_log = logging.getLogger(__name__)

#: How often a file is begun anew when somebody else ends the upload it goes into.
_ROUNDS = 3


class StreamTarget(S3Target):
    """A prefix of a bucket that takes files while they are produced.

    Objects carry no sha256, since that is known too late, but the size of their parts. They are proven by the checksum
    or the ETag that the server gives, or by reading them back where it gives none.
    """

    def __init__(self, uri: str, settings: PublishSettings, budget_bytes: int) -> None:
        """``budget_bytes`` bounds the parts in memory, as does the budget of the settings."""
        if not uri.startswith("s3://"):
            raise UsageError(
                "only S3 takes a model without a local copy",
                expected="s3://BUCKET/PREFIX",
                found=f"{uri.partition('://')[0]}://…" if "://" in uri else "an address without a scheme",
                fix="leave out --no-local-copy, or publish to S3",
            )
        super().__init__(uri, settings)
        self._budget_bytes = min(budget_bytes, settings.memory_budget_bytes)

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Refuse files that can't be cut into parts, by name → size in bytes, before the first is produced.

        Raises:
            UsageError: the memory budget is too small.
            PermanentPublishError: a file is larger than an object can be.
        """
        for nbytes in sizes.values():
            fit_parts(nbytes, self._settings, self._budget_bytes)

    def facts(self, name: str) -> ObjectFacts | None:
        """What the server says of an object; None where there is none."""
        return self._prover.facts(self._key(name))

    def read_range(self, name: str, facts: ObjectFacts, offset: int, length: int) -> bytes:
        """Bytes of an object; it must be the one that ``facts`` tell of."""
        return self._prover.read_range(self._key(name), facts, offset, length)

    def know(self, streamed: Streamed) -> None:
        """Take the digests of a file that an earlier run streamed, so that it can be proven without its bytes."""
        digest = ObjectDigest(sha256=streamed.record.sha256, digests=streamed.digests)
        plan = PartPlan(total_bytes=streamed.record.nbytes, part_bytes=streamed.part_bytes)
        self._remember(streamed.file, plan, digest)

    def put_stream(
        self, name: str, nbytes: int, produce: Produce, memory: Memory, progress: FileProgress
    ) -> Streamed | None:
        """Create an object out of what is produced.

        Parts that an open upload of ours holds already are not sent again. After an error that will not heal, the
        upload is aborted; after one that may, or a kill, it stays for the next run.

        Returns:
            What was sent; None where somebody else made an object of that name meanwhile, which is left alone.

        Raises:
            CkptflowError: what ``produce`` raises, or the store refused or failed.
        """
        plan, in_flight = fit_parts(nbytes, self._settings, self._budget_bytes)
        for round_number in range(_ROUNDS):
            attempt = _Attempt(self, name, plan, memory if round_number == 0 else _anew(memory))
            try:
                streamed = attempt.run(produce, in_flight, progress)
            except UploadGoneError:
                if self.facts(name) is not None:
                    return None
                continue
            if streamed is None:
                return None
            facts = self.facts(name)
            if facts is None or facts.sha256 in (None, streamed.record.sha256):
                self.tidy_file(name)
                return streamed
            # The upload was begun for another content that shares parts with ours, and carries its sha256.
            self.delete_file(name)
        raise TransientPublishError(
            "somebody else aborts the uploads to this key", file=self._where(name), fix="wait for the other run to end"
        )

    def digest_stream(self, name: str, nbytes: int, produce: Produce, facts: ObjectFacts) -> Streamed:
        """Digests of what is produced, cut as the object that is there; nothing is sent."""
        plan, in_flight = fit_parts(nbytes, self._settings, self._budget_bytes)
        if facts.part_bytes is not None and facts.part_bytes <= self._budget_bytes // 2:
            plan = plan_parts(nbytes, facts.part_bytes)
            in_flight = max(1, min(in_flight, self._budget_bytes // plan.part_bytes - 1))
        names = self._caller.digest_names | (set() if facts.proof is None else {facts.proof})

        def work(_: int, content: bytes) -> PartDigest:
            return digest_part(content, names)

        with PartStream(plan, self._pool, in_flight, work) as stream:
            record = produce(stream)
            digests = stream.finish()
        return _streamed(record, plan, digests, "skipped")

    def prove_streamed(self, streamed: Streamed) -> str | None:
        """How the object was proven equal to what was streamed; None where it is absent or differs."""
        self.know(streamed)
        return self.prove_file(streamed.file)

    def abort(self, name: str, upload_id: str) -> None:
        """Give up one upload; nothing happens where it is gone already."""
        abort_upload(self._caller, self._bucket, self._key(name), upload_id)

    @property
    def gives_checksums(self) -> bool:
        """Whether the server gives the checksums back that it takes, as far as that was seen."""
        return self._caller.gives_checksums

    def expect_no_checksums(self) -> None:
        """Make MD5s at once, since the server was seen not to give its checksums back."""
        self._caller.gives_checksums = False

    def _digest(self, file: LocalFile, plan: PartPlan, name: DigestName | None) -> ObjectDigest:
        if file.path.is_absolute() and file.path.is_file():
            return super()._digest(file, plan, name)
        found = self._digests.get((file.name, plan.part_bytes))
        # Without digests, nothing that the server says of it can be compared: it is read back.
        return found or ObjectDigest(sha256=file.sha256, digests={})


class _Attempt:
    """One try to send one file."""

    def __init__(self, target: StreamTarget, name: str, plan: PartPlan, memory: Memory) -> None:
        self._target = target
        self._name = name
        self._plan = plan
        self._memory = memory
        self._upload: OpenUpload | None = None
        self._sender = MultipartSender(
            caller=target._caller,
            pool=target._pool,
            bucket=target._bucket,
            key=target._key(name),
            file=LocalFile(name=name, path=Path(name), bytes=plan.total_bytes, sha256=""),
            plan=plan,
            window=1,
        )

    def run(self, produce: Produce, in_flight: int, progress: FileProgress) -> Streamed | None:
        """Produce, send, complete; None where the name is taken."""
        if self._plan.count == 1:
            return self._put_whole(produce, progress)
        try:
            work = partial(self._send, progress)
            with PartStream(self._plan, self._target._pool, in_flight, work, self._begin) as stream:
                record = produce(stream)
                sent = stream.finish()
        except UploadGoneError:
            raise
        except Exception as error:
            if not isinstance(error, TransientPublishError | OSError):
                self._abort()
            raise
        assert self._upload is not None
        streamed = _streamed(record, self._plan, [digest for digest, _ in sent], "sent")
        self._memory.keep_streamed(streamed)
        return streamed if self._sender.complete(self._upload, sent) else None

    def _put_whole(self, produce: Produce, progress: FileProgress) -> Streamed | None:
        """A file of one part is whole before it is sent: it gets its sha256 like any other."""
        contents: list[bytes] = []
        with PartStream(self._plan, self._target._pool, 1, lambda _, content: contents.append(content)) as stream:
            record = produce(stream)
            stream.finish()
        digest = digest_part(contents[0], self._target._caller.digest_names)
        streamed = _streamed(record, self._plan, [digest], "sent")
        self._memory.keep_streamed(streamed)
        is_created = self._target._put(self._name, contents[0], digest, object_metadata(streamed.file, self._plan))
        progress.finish()
        return streamed if is_created else None

    def _begin(self, first: bytes) -> None:
        """Choose the upload that the parts go into, by the first of them."""
        ids = self._target._open_uploads().get(self._sender.key, [])
        if self._memory.upload_id is not None and self._memory.upload_id not in ids:
            ids = [*ids, self._memory.upload_id]  # begun after this run first asked, by the try before
        found = [upload for each in ids if (upload := self._sender.open_upload(each)) is not None and upload.parts]
        found.sort(key=lambda upload: (upload.upload_id != self._memory.upload_id, -len(upload.parts)))
        self._upload = next((upload for upload in found if self._is_ours(upload, first)), None)
        if self._target._prover.is_there(self._sender.key):
            # A killed run had asked for the completion, which ended after this run looked.
            raise UploadGoneError(self._sender.where)
        if self._upload is None:
            self._upload = self._sender.create()
        else:
            _log.info("%s: goes on with an open upload that has %d parts", self._name, len(self._upload.parts))
        self._memory.keep_upload_id(self._upload.upload_id)

    def _is_ours(self, upload: OpenUpload, first: bytes) -> bool:
        """Whether all parts have the planned size, and we began it or it has our first part; the rest is compared."""
        if max(upload.parts) > self._plan.count:
            return False
        if any(part.get("Size") != self._plan.part(number)[1] for number, part in upload.parts.items()):
            return False
        if upload.upload_id == self._memory.upload_id:
            return True
        part = upload.parts.get(1)
        return part is not None and is_equal(part, digest_part(first, self._target._caller.digest_names | {"MD5"}))

    def _send(self, progress: FileProgress, number: int, content: bytes) -> tuple[PartDigest, str]:
        assert self._upload is not None
        sent = self._sender.send_part(self._upload, number, content)
        progress.add(len(content))
        return sent

    def _abort(self) -> None:
        try:
            if self._upload is not None:
                self._target.abort(self._name, self._upload.upload_id)
        except PublishError as error:  # what went wrong before is what a person should read
            _log.warning("%s: an open upload is left at the destination (%s)", self._name, error.what)


def _anew(memory: Memory) -> Memory:
    return Memory(upload_id=None, keep_upload_id=memory.keep_upload_id, keep_streamed=memory.keep_streamed)


def _streamed(
    record: WeightFileRecord, plan: PartPlan, digests: list[PartDigest], outcome: Literal["sent", "skipped"]
) -> Streamed:
    whole = digest_object(record.sha256, digests)
    return Streamed(record=record, part_bytes=plan.part_bytes, digests=whole.digests, outcome=outcome)
