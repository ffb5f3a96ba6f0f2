"""Reading back from S3: what is there, and is it what we have."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError, ResponseStreamingError

from ckptflow.errors import TransientPublishError
from ckptflow.processes.pools import windowed
from ckptflow.publish.digests import DigestName, ObjectDigest
from ckptflow.publish.model import LocalFile
from ckptflow.publish.parts import MAX_PART_BYTES, PartPlan, plan_parts
from ckptflow.publish.s3_client import CHECKSUM_FIELDS, CHECKSUMS, S3Caller
from ckptflow.publish.s3_errors import error_code
from ckptflow.publish.settings import MIB, VerifyMode

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import HeadObjectOutputTypeDef, HeadObjectRequestTypeDef

_RANGE_BYTES = 16 * MIB
#: How a person reads it: of an object that was put whole, and of one that was put in parts.
_PROOFS: Mapping[DigestName, tuple[str, str]] = {
    "CRC64NVME": ("CRC-64/NVME", "CRC-64/NVME"),
    "SHA256": ("SHA-256", "SHA-256 of parts"),
    "MD5": ("MD5 (ETag)", "MD5 of parts (ETag)"),
}
_MD5_ETAG = re.compile(r"[0-9a-f]{32}(-\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFacts:
    """What the server says of an object.

    Attributes:
        bytes: its size.
        etag: its ETag, whatever it is made of.
        digests: as in ``ObjectDigest``: the checksums that the server has, and the ETag where it may be made of MD5s.
        sha256: our own metadata.
        part_bytes: our own metadata; None where somebody else put the object.
    """

    bytes: int
    etag: str
    digests: Mapping[DigestName, str]
    sha256: str | None
    part_bytes: int | None

    @property
    def proof(self) -> DigestName | None:
        """The digest that says most of it; None where there is none."""
        return next((name for name in ("SHA256", "CRC64NVME", "MD5") if name in self.digests), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Prover:
    """Proves that an object is equal to a local file."""

    caller: S3Caller
    pool: Executor
    bucket: str
    window: int
    verify: VerifyMode

    def is_there(self, key: str) -> bool:
        """Whether there is such an object, whatever it is."""
        return self._head(key, with_checksum=False) is not None

    def facts(self, key: str) -> ObjectFacts | None:
        """What the server says of an object, or None where there is no such object."""
        head = self._head(key, with_checksum=True)
        if head is None:
            return None
        etag = head["ETag"].strip('"')
        checksums = {name: str(head.get(CHECKSUM_FIELDS[name], "")) for name in CHECKSUMS}
        digests = {**checksums, "MD5": etag if _MD5_ETAG.fullmatch(etag) else ""}
        return ObjectFacts(
            bytes=head["ContentLength"],
            etag=etag,
            digests={name: value for name, value in digests.items() if value},
            sha256=head["Metadata"].get("sha256"),
            part_bytes=_part_bytes(head["Metadata"].get("part-bytes", "")),
        )

    def prove(
        self, key: str, file: LocalFile, digest: Callable[[PartPlan, DigestName | None], ObjectDigest]
    ) -> str | None:
        """How the object was proven equal to the file; None where it is absent or differs.

        Args:
            digest: the digests of the local file, cut as the plan says, with the one that is named among them, if any;
                checks the file against the record.
        """
        facts = self.facts(key)
        if facts is None or facts.bytes != file.bytes or facts.sha256 not in (None, file.sha256):
            return None
        if self.verify == "size" and facts.sha256 is not None:
            return "size and stored sha256"
        # An object that somebody else put has no part size; its ETag then matches only if it was put whole.
        plan = plan_parts(file.bytes, facts.part_bytes or _RANGE_BYTES)
        if facts.proof == "MD5" and facts.part_bytes is not None:
            # An object of ours without the checksum that was sent with it: the next files get MD5s at once.
            self.caller.gives_checksums = False
        name = None if self.verify == "full" else facts.proof
        local = digest(plan, name)
        if name is not None and facts.digests[name] == local.digests.get(name):
            return _PROOFS[name][plan.count > 1]
        return "sha256 read back" if self._read_sha256(key, facts) == file.sha256 else None

    def _head(self, key: str, *, with_checksum: bool) -> HeadObjectOutputTypeDef | None:
        def action(client: S3Client) -> HeadObjectOutputTypeDef | None:
            request: HeadObjectRequestTypeDef = {"Bucket": self.bucket, "Key": key}
            if with_checksum and self.caller.checksum is not None:
                request["ChecksumMode"] = "ENABLED"
            try:
                return client.head_object(**request)
            except ClientError as error:
                if error_code(error) not in ("404", "NoSuchKey"):
                    raise
                return None

        return self.caller.run(action, what="can't look at an object", where=self._where(key))

    def _read_sha256(self, key: str, facts: ObjectFacts) -> str:
        ranges = range(0, facts.bytes, _RANGE_BYTES)
        whole = sha256()

        def read(offset: int) -> bytes:
            return self.read_range(key, facts, offset, min(_RANGE_BYTES, facts.bytes - offset))

        for content in windowed(self.pool, read, ranges, self.window):
            whole.update(content)
        return whole.hexdigest()

    def read_range(self, key: str, facts: ObjectFacts, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` on, of the very object that ``facts`` tell of.

        Raises:
            TransientPublishError: it is another object by now.
        """
        last = offset + length - 1

        def action(client: S3Client) -> bytes:
            # IfMatch: all ranges are of one object.
            answer = client.get_object(
                Bucket=self.bucket, Key=key, Range=f"bytes={offset}-{last}", IfMatch=f'"{facts.etag}"'
            )
            content = answer["Body"].read()
            if len(content) != length:
                raise ResponseStreamingError(error=f"{len(content)} of {length} bytes came")
            return content

        try:
            return self.caller.run(
                action, what="can't read an object back", where=self._where(key), passing=("PreconditionFailed", "412")
            )
        except ClientError as error:
            raise TransientPublishError(
                "the object changed while it was read",
                file=self._where(key),
                fix="run it again when nobody writes there",
            ) from error

    def _where(self, key: str) -> str:
        return f"s3://{self.bucket}/{key}"


def _part_bytes(text: str) -> int | None:
    size = int(text) if re.fullmatch(r"[0-9]{1,12}", text) else 0
    return size if 0 < size <= MAX_PART_BYTES else None
