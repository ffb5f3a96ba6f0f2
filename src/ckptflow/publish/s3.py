"""``s3://BUCKET/PREFIX``: AWS S3 and what speaks its protocol."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from ckptflow.errors import PermanentPublishError, TransientPublishError, UsageError
from ckptflow.publish.digests import DigestName, ObjectDigest, PartDigest, digest_file, digest_object, digest_part
from ckptflow.publish.model import MARKER_NAME, LocalFile, LocalModel
from ckptflow.publish.parts import PartPlan, plan_parts
from ckptflow.publish.s3_client import S3Caller
from ckptflow.publish.s3_errors import error_code
from ckptflow.publish.s3_multipart import MultipartSender, UploadGoneError, abort_upload, object_metadata
from ckptflow.publish.s3_proof import S3Prover
from ckptflow.publish.settings import PublishSettings
from ckptflow.publish.slots import PartSlots
from ckptflow.publish.source import check_sha256, open_source, read_part
from ckptflow.publish.targets import Progress

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import PutObjectRequestTypeDef

_log = logging.getLogger(__name__)

#: How often a file is begun anew when somebody else ends the upload it goes into.
_ROUNDS = 3


class S3Target:
    """A prefix of a bucket as a destination.

    Objects appear whole by S3's own rules. Each carries its sha256 as metadata. A killed run leaves finished objects
    and at most three open multipart uploads, which the next run goes on with; other open uploads of a file that is
    finished are aborted.
    """

    #: While one is completed and proven, and the last parts of the next are on their way, the third one's are sent.
    large_files_at_once = 3

    def __init__(self, uri: str, settings: PublishSettings) -> None:
        self._uri = uri
        self._settings = settings
        self._bucket, self._prefix = _bucket_and_prefix(uri)
        self._caller = S3Caller(settings)
        self._pool = ThreadPoolExecutor(settings.max_concurrency, thread_name_prefix="ckptflow-s3")
        self._prover = S3Prover(
            caller=self._caller,
            pool=self._pool,
            bucket=self._bucket,
            window=settings.max_concurrency,
            verify=settings.verify,
        )
        self._slots = PartSlots(settings.max_concurrency, settings.memory_budget_bytes)
        self._digests: dict[tuple[str, int], ObjectDigest] = {}
        self._open_upload_ids: dict[str, list[str]] | None = None
        self._listing = threading.Lock()

    @property
    def uri(self) -> str:
        """The destination as it was given."""
        return self._uri

    @property
    def revision(self) -> None:
        """A prefix has none."""
        return

    def prepare(self, model: LocalModel) -> None:
        """Refuse files that are too large for an object before the first is sent."""
        for file in model.files:
            plan_parts(file.bytes, self._settings.part_size_bytes)

    def check_rights(self) -> None:
        """Open an upload of the marker, and abort it: that takes the right to write, and no reader sees it."""

        def action(client: S3Client) -> str:
            return client.create_multipart_upload(Bucket=self._bucket, Key=self._key(MARKER_NAME))["UploadId"]

        upload_id = self._caller.run(action, what="can't write to the destination", where=self._uri)
        try:
            abort_upload(self._caller, self._bucket, self._key(MARKER_NAME), upload_id)
        except PermanentPublishError as error:  # a right of its own, which an upload that succeeds does not need
            _log.warning("%s: an upload without parts is left open: %s", self._uri, error.found)

    def close(self) -> None:
        """Stop the threads and close the connections.

        A request that is on its way after an interrupt is not waited for; it ends at its own timeout, untried again.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._caller.close()

    def list_files(self) -> dict[str, str]:
        """Name → ETag and size; placeholders of empty folders are no files."""

        def action(client: S3Client) -> dict[str, str]:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
            return {
                entry["Key"].removeprefix(self._prefix): f"{entry.get('ETag')} {entry.get('Size')}"
                for page in pages
                for entry in page.get("Contents", [])
                if not entry["Key"].endswith("/")
            }

        return self._caller.run(action, what="can't list the destination", where=self._uri)

    def read_file(self, name: str) -> bytes | None:
        """Content of a small object, or None."""

        def action(client: S3Client) -> bytes | None:
            try:
                return client.get_object(Bucket=self._bucket, Key=self._key(name))["Body"].read()
            except ClientError as error:
                if error_code(error) != "NoSuchKey":
                    raise
                return None

        return self._caller.run(action, what="can't read an object", where=self._where(name))

    def put_bytes(self, name: str, content: bytes) -> bool:
        """Create a small object."""
        return self._put(name, content, digest_part(content, self._caller.digest_names), {})

    def put_file(self, file: LocalFile, progress: Progress) -> bool:
        """Create an object from a local file: whole where it fits one part, else in parts, some at once."""
        plan = plan_parts(file.bytes, self._settings.part_size_bytes)
        return self._put_whole(file, plan, progress) if plan.count == 1 else self._put_parts(file, plan, progress)

    def prove_file(self, file: LocalFile) -> str | None:
        """By size and the server's checksum or ETag; by the sha256 of the bytes read back where it has none."""
        return self._prover.prove(self._key(file.name), file, partial(self._digest, file))

    def delete_file(self, name: str) -> None:
        """Remove an object."""

        def action(client: S3Client) -> None:
            client.delete_object(Bucket=self._bucket, Key=self._key(name))

        self._caller.run(action, what="can't delete an object", where=self._where(name))

    def tidy_file(self, name: str) -> None:
        """Abort the uploads to its key, as far as they were open when this run first asked."""
        key = self._key(name)
        for upload_id in self._open_uploads().pop(key, []):
            abort_upload(self._caller, self._bucket, key, upload_id)

    def _put_whole(self, file: LocalFile, plan: PartPlan, progress: Progress) -> bool:
        progress(0)  # raises where the file is not to be sent after all
        with open_source(file) as fd:
            content = read_part(fd, file, plan, 1)
        check_sha256(file, sha256(content).hexdigest())
        digest = digest_part(content, self._caller.digest_names)
        self._remember(file, plan, digest_object(file.sha256, [digest]))
        is_created = self._put(file.name, content, digest, object_metadata(file, plan))
        progress(len(content))
        return is_created

    def _put(self, name: str, content: bytes, digest: PartDigest, metadata: dict[str, str]) -> bool:
        def action(client: S3Client) -> bool:
            request: PutObjectRequestTypeDef = {
                "Bucket": self._bucket,
                "Key": self._key(name),
                "Body": content,
                "Metadata": metadata,
            }
            request.update(self._caller.checksum_of(content, digest))  # type: ignore[typeddict-item]
            if self._caller.is_conditional:
                request["IfNoneMatch"] = "*"
            elif self._prover.is_there(self._key(name)):
                return False
            try:
                client.put_object(**request)
            except ClientError as error:
                if error_code(error) != "PreconditionFailed":
                    raise
                return False
            return True

        return self._caller.run(action, what="can't put an object", where=self._where(name))

    def _put_parts(self, file: LocalFile, plan: PartPlan, progress: Progress) -> bool:
        sender = MultipartSender(
            caller=self._caller,
            pool=self._pool,
            bucket=self._bucket,
            key=self._key(file.name),
            file=file,
            plan=plan,
            window=self._window(plan),
            slots=self._slots,
        )
        upload = sender.resumable(self._open_uploads().get(sender.key, []))
        # Without asking for a checksum: a server that doesn't know that header could not say so in an answer to HEAD.
        if self._prover.is_there(sender.key):
            # A killed run had asked for the completion, which ended after this run listed the destination.
            return False
        for _ in range(_ROUNDS):
            try:
                is_created, digest = sender.send(upload, progress)
            except UploadGoneError:
                if self._prover.is_there(sender.key):
                    return False
                upload = None
                continue
            self._remember(file, plan, digest)
            facts = self._prover.facts(sender.key) if is_created and upload is not None else None
            if facts is None or facts.sha256 == file.sha256:
                return is_created
            # The upload was begun for another content that shares parts with ours, and carries its sha256.
            self.delete_file(file.name)
            upload = None
        raise TransientPublishError(
            "somebody else aborts the uploads to this key", file=sender.where, fix="wait for the other run to end"
        )

    def _open_uploads(self) -> dict[str, list[str]]:
        """Key → ids of the uploads that were open when this run first asked."""
        with self._listing:
            if self._open_upload_ids is None:
                self._open_upload_ids = self._list_open_uploads()
            return self._open_upload_ids

    def _list_open_uploads(self) -> dict[str, list[str]]:
        def action(client: S3Client) -> dict[str, list[str]]:
            found: dict[str, list[str]] = defaultdict(list)
            pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=self._prefix)
            for page in pages:
                for upload in page.get("Uploads", []):
                    found[upload["Key"]].append(upload["UploadId"])
            return found

        try:
            return self._caller.run(
                action, what="can't list open uploads", where=self._uri, passing=("NotImplemented", "AccessDenied")
            )
        except ClientError as error:
            _log.warning(
                "%s: open uploads can't be listed: files are sent from the start, and what was left half stays (%s)",
                self._uri,
                self._caller.told(error),
            )
            return {}

    def _digest(self, file: LocalFile, plan: PartPlan, name: DigestName | None) -> ObjectDigest:
        found = self._digests.get((file.name, plan.part_bytes))
        if found is None or (name is not None and name not in found.digests):
            found = digest_file(self._pool, file, plan, self._window(plan), [] if name is None else [name])
            self._remember(file, plan, found)
        return found

    def _remember(self, file: LocalFile, plan: PartPlan, digest: ObjectDigest) -> None:
        self._digests[file.name, plan.part_bytes] = digest

    def _window(self, plan: PartPlan) -> int:
        """Parts in memory at once."""
        return max(1, min(self._settings.max_concurrency, self._settings.memory_budget_bytes // plan.part_bytes))

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _where(self, name: str) -> str:
        return f"s3://{self._bucket}/{self._key(name)}"


def _bucket_and_prefix(uri: str) -> tuple[str, str]:
    # By hand: "?" and "#" are letters like others in a key.
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    if "@" in bucket:
        raise UsageError(
            "the destination holds a user name or password",
            fix="give credentials by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or an AWS profile",
        )
    if not bucket:
        raise UsageError(
            "the destination names no bucket",
            expected="s3://BUCKET/PREFIX",
            found=uri,
            fix="give the bucket after s3://, with two slashes",
        )
    prefix = prefix.strip("/")
    return bucket, f"{prefix}/" if prefix else ""
