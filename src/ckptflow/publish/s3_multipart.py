"""Sending one file to S3 in parts, and going on with an upload that a killed run left open.

A multipart upload is invisible until it is completed; what a kill leaves behind is an open upload with its parts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, TypeVar

from botocore.exceptions import ClientError

from ckptflow.errors import VerificationError
from ckptflow.publish.digests import ObjectDigest, PartDigest, digest_object, digest_part
from ckptflow.publish.model import LocalFile
from ckptflow.publish.parts import PartPlan
from ckptflow.publish.s3_client import CHECKSUM_FIELDS, CHECKSUMS, S3Caller
from ckptflow.publish.s3_errors import error_code
from ckptflow.publish.slots import PartSlots, work_in_slots
from ckptflow.publish.source import check_sha256, open_source, read_part, read_part_into
from ckptflow.publish.targets import Progress

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import (
        CompletedPartTypeDef,
        CompleteMultipartUploadRequestTypeDef,
        CreateMultipartUploadRequestTypeDef,
        PartTypeDef,
        UploadPartRequestTypeDef,
    )

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class UploadGoneError(Exception):
    """The open upload was completed or aborted by somebody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenUpload:
    """An upload that is not completed, and the parts that the server holds, by number from 1."""

    upload_id: str
    parts: Mapping[int, PartTypeDef] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MultipartSender:
    """Sends one file to one key. Parts in memory at once are ``window``, or what ``slots`` say, shared with others."""

    caller: S3Caller
    pool: Executor
    bucket: str
    key: str
    file: LocalFile
    plan: PartPlan
    window: int
    slots: PartSlots | None = None

    @property
    def where(self) -> str:
        """Bucket and key, for messages."""
        return f"s3://{self.bucket}/{self.key}"

    def resumable(self, upload_ids: list[str]) -> OpenUpload | None:
        """Of the open uploads, the one with most parts that are this file's; None where no one's are."""
        candidates = [upload for upload_id in upload_ids if (upload := self.open_upload(upload_id)) is not None]
        for upload in sorted(candidates, key=lambda upload: len(upload.parts), reverse=True):
            if self._belongs(upload):
                return upload
        return None

    def send(self, upload: OpenUpload | None, progress: Progress) -> tuple[bool, ObjectDigest]:
        """Send all parts that the server lacks, and complete the upload.

        Returns:
            Whether the object was created by this call (False: the key is taken), and the digests of the file.

        Raises:
            UploadGoneError: somebody else completed or aborted the upload.
            VerificationError: the local file is not what the record says; the upload was aborted.
        """
        upload = upload or self.create()
        if upload.parts:
            _log.info("%s: goes on with an open upload that has %d parts", self.where, len(upload.parts))
        whole = sha256()

        def send_part(place: int, content: bytearray) -> tuple[PartDigest, str]:
            sent = self.send_part(upload, place + 1, content)
            progress(len(content))
            return sent

        try:
            with open_source(self.file) as fd:

                def read(place: int, content: bytearray) -> None:
                    progress(0)  # raises where the file is not to be sent after all
                    read_part_into(content, fd, self.file, self.plan, place + 1)
                    whole.update(content)

                slots = self.slots or PartSlots(self.window, self.window * self.plan.part_bytes)
                lengths = [self.plan.part(number)[1] for number in range(1, self.plan.count + 1)]
                sent = work_in_slots(self.pool, slots, lengths, read, send_part)
            check_sha256(self.file, whole.hexdigest())
        except VerificationError:
            abort_upload(self.caller, self.bucket, self.key, upload.upload_id)
            raise
        digest = digest_object(self.file.sha256, [part for part, _ in sent])
        return self.complete(upload, sent), digest

    def create(self) -> OpenUpload:
        """Begin an upload."""

        def action(client: S3Client) -> str:
            request: CreateMultipartUploadRequestTypeDef = {
                "Bucket": self.bucket,
                "Key": self.key,
                "Metadata": object_metadata(self.file, self.plan),
            }
            if self.caller.checksum == "CRC64NVME":
                request["ChecksumAlgorithm"], request["ChecksumType"] = "CRC64NVME", "FULL_OBJECT"
            elif self.caller.checksum == "SHA256":
                request["ChecksumAlgorithm"] = "SHA256"
            return client.create_multipart_upload(**request)["UploadId"]

        return OpenUpload(upload_id=self.caller.run(action, what="can't begin an upload", where=self.where))

    def send_part(self, upload: OpenUpload, number: int, content: bytes | bytearray) -> tuple[PartDigest, str]:
        """Send one part unless the server has it; gives its digests and its ETag.

        Raises:
            UploadGoneError: somebody else completed or aborted the upload.
        """
        there = upload.parts.get(number)
        digest = digest_part(content, self.caller.digest_names | ({"MD5"} if there is not None else set()))
        if there is not None and is_equal(there, digest):
            return digest, there["ETag"]

        def action(client: S3Client) -> str:
            request: UploadPartRequestTypeDef = {
                "Bucket": self.bucket,
                "Key": self.key,
                "UploadId": upload.upload_id,
                "PartNumber": number,
                "Body": content,  # type: ignore[typeddict-item]  # a bytearray is as good as bytes to boto3
            }
            request.update(self.caller.checksum_of(content, digest))  # type: ignore[typeddict-item]
            return client.upload_part(**request)["ETag"]

        # Parts must have the checksum that an upload was begun with, and not every server lists which that was.
        refused = ("InvalidRequest",) if upload.parts else ()
        try:
            return digest, self._unless_gone(action, "can't send a part", passing=refused)
        except ClientError as error:
            _log.warning(
                "%s: an open upload takes no more parts; it is begun anew (%s)", self.where, self.caller.told(error)
            )
            abort_upload(self.caller, self.bucket, self.key, upload.upload_id)
            raise UploadGoneError(self.where) from error

    def complete(self, upload: OpenUpload, sent: list[tuple[PartDigest, str]]) -> bool:
        """Make the object of its parts. False: the key is taken; the upload was aborted.

        Raises:
            UploadGoneError: somebody else completed or aborted the upload.
        """

        def action(client: S3Client) -> bool:
            parts: list[CompletedPartTypeDef] = []
            for number, (digest, etag) in enumerate(sent, start=1):
                part: CompletedPartTypeDef = {"PartNumber": number, "ETag": etag}
                name = self.caller.checksum
                if name is not None and name in digest.digests:
                    part[CHECKSUM_FIELDS[name]] = digest.text(name)  # type: ignore[literal-required]
                parts.append(part)
            request: CompleteMultipartUploadRequestTypeDef = {
                "Bucket": self.bucket,
                "Key": self.key,
                "UploadId": upload.upload_id,
                "MultipartUpload": {"Parts": parts},
            }
            if self.caller.is_conditional:
                request["IfNoneMatch"] = "*"
            try:
                client.complete_multipart_upload(**request)
            except ClientError as error:
                if error_code(error) != "PreconditionFailed":
                    raise
                return False
            return True

        is_created = self._unless_gone(action, "can't complete an upload")
        if not is_created:
            abort_upload(self.caller, self.bucket, self.key, upload.upload_id)
        return is_created

    def _unless_gone(self, action: Callable[[S3Client], _T], what: str, passing: tuple[str, ...] = ()) -> _T:
        try:
            return self.caller.run(action, what=what, where=self.where, passing=("NoSuchUpload", *passing))
        except ClientError as error:
            if error_code(error) in passing:
                raise
            raise UploadGoneError(self.where) from error

    def open_upload(self, upload_id: str) -> OpenUpload | None:
        """An upload with the parts that it has; None where it is gone, or was begun with another checksum."""

        def action(client: S3Client) -> OpenUpload | None:
            parts: dict[int, PartTypeDef] = {}
            for page in client.get_paginator("list_parts").paginate(
                Bucket=self.bucket, Key=self.key, UploadId=upload_id
            ):
                # Its parts must have the checksum that it was begun with, where it was begun with one.
                if page.get("ChecksumAlgorithm", self.caller.checksum) != self.caller.checksum:
                    return None
                parts |= {part["PartNumber"]: part for part in page.get("Parts", [])}
            return OpenUpload(upload_id=upload_id, parts=parts)

        try:
            return self._unless_gone(action, "can't list the parts of an open upload")
        except UploadGoneError:
            return None

    def _belongs(self, upload: OpenUpload) -> bool:
        """Whether all parts have the planned size and the last one our bytes; the others are compared when sent."""
        if not upload.parts or max(upload.parts) > self.plan.count:
            return False
        if any(part.get("Size") != self.plan.part(number)[1] for number, part in upload.parts.items()):
            return False
        last = max(upload.parts)
        with open_source(self.file) as fd:
            content = read_part(fd, self.file, self.plan, last)
        return is_equal(upload.parts[last], digest_part(content, self.caller.digest_names | {"MD5"}))


def abort_upload(caller: S3Caller, bucket: str, key: str, upload_id: str) -> None:
    """Give up an open upload and free its parts; nothing happens where it is gone already."""
    where = f"s3://{bucket}/{key}"

    def action(client: S3Client) -> None:
        client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id)

    try:
        caller.run(action, what="can't abort an upload", where=where, passing=("NoSuchUpload",))
    except ClientError:
        _log.debug("%s: the upload was gone already", where)


def object_metadata(file: LocalFile, plan: PartPlan) -> dict[str, str]:
    """What is stored beside an object: its sha256, where it is known yet, and the part size of its digests."""
    known = {"sha256": file.sha256} if file.sha256 else {}
    return {**known, "part-bytes": str(plan.part_bytes)}


def is_equal(there: PartTypeDef, digest: PartDigest) -> bool:
    """Whether a part that the server lists is the one with these digests."""
    # The ETag is the MD5 unless the bucket encrypts with KMS; then AWS lists the part's checksum.
    is_same = digest.etag is not None and there.get("ETag", "").strip('"') == digest.etag
    checksums = (there.get(CHECKSUM_FIELDS[name]) == digest.text(name) for name in CHECKSUMS if name in digest.digests)
    return there.get("Size") == digest.nbytes and (is_same or any(checksums))
