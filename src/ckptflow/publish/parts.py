"""How a file is cut into the parts of a multipart upload, and what their digests add up to. Pure.

Limits: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ckptflow.errors import PermanentPublishError

MIB = 1 << 20
MIN_PART_BYTES = 5 * MIB  # all parts but the last
MAX_PART_BYTES = 5 << 30
MAX_PARTS = 10_000
MAX_OBJECT_BYTES = 5 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """Equal parts, the last one shorter; sizes in bytes. An empty file is one empty part."""

    total_bytes: int
    part_bytes: int

    @property
    def count(self) -> int:
        """Number of parts, at least 1."""
        return max(1, -(-self.total_bytes // self.part_bytes))

    def part(self, number: int) -> tuple[int, int]:
        """Offset and length in bytes of part ``number``, which counts from 1 as S3 does."""
        offset = (number - 1) * self.part_bytes
        return offset, min(self.part_bytes, self.total_bytes - offset)


def plan_parts(total_bytes: int, wanted_part_bytes: int, *, max_parts: int = MAX_PARTS) -> PartPlan:
    """Cut ``total_bytes`` so that no limit is met: the part size is raised, to a whole MiB, where it must be.

    Raises:
        PermanentPublishError: the file is larger than an S3 object can be.
    """
    largest = min(MAX_OBJECT_BYTES, max_parts * MAX_PART_BYTES)
    if total_bytes > largest:
        raise PermanentPublishError(
            "the file is larger than an object can be",
            expected=f"at most {largest} bytes",
            found=f"{total_bytes} bytes",
            fix="convert again with a smaller --max-shard-size",
        )
    least = -(-total_bytes // max_parts)
    part_bytes = max(wanted_part_bytes, MIN_PART_BYTES)
    if least > part_bytes:
        part_bytes = -(-least // MIB) * MIB
    return PartPlan(total_bytes=total_bytes, part_bytes=min(part_bytes, MAX_PART_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDigest:
    """SHA-256 (32 bytes) of one part, and its MD5 (16 bytes) where a server needs it."""

    sha256: bytes
    md5: bytes | None

    @property
    def etag(self) -> str | None:
        """The part's ETag where the server derives it from the MD5."""
        return None if self.md5 is None else self.md5.hex()

    @property
    def sha256_base64(self) -> str:
        """The SHA-256 as S3 writes it."""
        return base64.b64encode(self.sha256).decode()

    @property
    def md5_base64(self) -> str:
        """The MD5 as the header Content-MD5 has it."""
        return base64.b64encode(self.md5 or b"").decode()


def digest_part(content: bytes | bytearray, *, with_md5: bool) -> PartDigest:
    """Digest one part. An MD5 costs more than twice the CPU time of a SHA-256, so it is made on demand only."""
    md5 = hashlib.md5(content, usedforsecurity=False).digest() if with_md5 else None
    return PartDigest(sha256=hashlib.sha256(content).digest(), md5=md5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectDigest:
    """What a server that is right says of an object.

    Attributes:
        sha256: of the content, hex.
        checksum: the SHA-256 in S3's words: base64, of the parts' digests where there are several.
        etag: made of MD5s; None where a part has none.
    """

    sha256: str
    checksum: str
    etag: str | None


def digest_object(sha256: str, parts: Sequence[PartDigest]) -> ObjectDigest:
    """Digests of an object out of its parts; one part means that it was put whole.

    A multipart ETag is the MD5 of the parts' MD5s, a composite checksum the SHA-256 of the parts' SHA-256s, each with
    ``-N``: https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html
    """
    if len(parts) == 1:
        return ObjectDigest(sha256=sha256, checksum=parts[0].sha256_base64, etag=parts[0].etag)
    suffix = f"-{len(parts)}"
    sha256_of_sha256s = hashlib.sha256(b"".join(part.sha256 for part in parts)).digest()
    md5s = [part.md5 for part in parts if part.md5 is not None]
    etag = hashlib.md5(b"".join(md5s), usedforsecurity=False).hexdigest() + suffix
    return ObjectDigest(
        sha256=sha256,
        checksum=base64.b64encode(sha256_of_sha256s).decode() + suffix,
        etag=etag if len(md5s) == len(parts) else None,
    )
