"""Digests of parts and of the objects that they make, by which S3 and we compare contents.

CRC-64/NVME: https://reveng.sourceforge.io/crc-catalogue/all.htm#crc.cat.crc-64-nvme
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Literal

import anycrc

from ckptflow.processes.pools import windowed
from ckptflow.publish.model import LocalFile
from ckptflow.publish.parts import PartPlan
from ckptflow.publish.source import check_sha256, open_source, read_part

#: By what the content of a part or an object is told apart from others: the checksums that S3 makes of what it is sent,
#: if asked to, and the MD5 that most servers make an ETag of.
DigestName = Literal["CRC64NVME", "SHA256", "MD5"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDigest:
    """Digests of one part of ``nbytes`` bytes, by name: CRC-64/NVME (8 bytes), SHA-256 (32), MD5 (16)."""

    nbytes: int
    digests: Mapping[DigestName, bytes]

    @property
    def etag(self) -> str | None:
        """The part's ETag where the server derives it from the MD5; None where that was not made."""
        return self.digests["MD5"].hex() if "MD5" in self.digests else None

    def text(self, name: DigestName) -> str:
        """A digest that was made, as the headers of S3 have it: base64."""
        return base64.b64encode(self.digests[name]).decode()


def digest_part(content: bytes | bytearray, names: Iterable[DigestName]) -> PartDigest:
    """Make some digests of one part. A SHA-256 costs four times the CPU time of a CRC-64, an MD5 ten times."""
    return PartDigest(nbytes=len(content), digests={name: _MAKE[name](content) for name in names})


def _crc64nvme(content: bytes | bytearray) -> bytes:
    crc: int = _CRC64NVME.calc(content)
    return crc.to_bytes(8, "big")


def _sha256(content: bytes | bytearray) -> bytes:
    return hashlib.sha256(content).digest()


def _md5(content: bytes | bytearray) -> bytes:
    return hashlib.md5(content, usedforsecurity=False).digest()


_CRC64NVME = anycrc.Model("CRC64-NVME")
_MAKE: Mapping[DigestName, Callable[[bytes | bytearray], bytes]] = {
    "CRC64NVME": _crc64nvme,
    "SHA256": _sha256,
    "MD5": _md5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectDigest:
    """What a server that is right says of an object.

    Attributes:
        sha256: of the content, hex.
        digests: those that all parts had, in S3's words. CRC64NVME is of the whole content, in base64; SHA256 is in
            base64, of the parts' digests where there are several; MD5 is the ETag, in hex, made in the same way.
    """

    sha256: str
    digests: Mapping[DigestName, str]


def digest_object(sha256: str, parts: Sequence[PartDigest]) -> ObjectDigest:
    """Digests of an object out of its parts; one part means that it was put whole.

    CRCs of parts add up to that of the whole. A multipart ETag is the MD5 of the parts' MD5s, a composite checksum the
    SHA-256 of the parts' SHA-256s, each with ``-N``:
    https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html
    """
    names = [name for name in _MAKE if all(name in part.digests for part in parts)]
    return ObjectDigest(sha256=sha256, digests={name: _COMBINE[name](parts) for name in names})


def _whole_crc64nvme(parts: Sequence[PartDigest]) -> str:
    crc = 0
    for part in parts:
        crc = _CRC64NVME.combine(crc, int.from_bytes(part.digests["CRC64NVME"], "big"), part.nbytes)
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


def _composite_sha256(parts: Sequence[PartDigest]) -> str:
    digests = [part.digests["SHA256"] for part in parts]
    if len(digests) == 1:
        return base64.b64encode(digests[0]).decode()
    return f"{base64.b64encode(_sha256(b''.join(digests))).decode()}-{len(digests)}"


def _composite_md5(parts: Sequence[PartDigest]) -> str:
    digests = [part.digests["MD5"] for part in parts]
    return digests[0].hex() if len(digests) == 1 else f"{_md5(b''.join(digests)).hex()}-{len(digests)}"


_COMBINE: Mapping[DigestName, Callable[[Sequence[PartDigest]], str]] = {
    "CRC64NVME": _whole_crc64nvme,
    "SHA256": _composite_sha256,
    "MD5": _composite_md5,
}


def digest_file(
    pool: Executor, file: LocalFile, plan: PartPlan, window: int, names: Collection[DigestName]
) -> ObjectDigest:
    """Digests of a local file as an object of these parts: its sha256, and those of each part that are named.

    Raises:
        VerificationError: the content is not what the record says.
    """
    whole = hashlib.sha256()

    def parts(fd: int) -> Iterator[bytes]:
        for number in range(1, plan.count + 1):
            content = read_part(fd, file, plan, number)
            whole.update(content)
            yield content

    with open_source(file) as fd:
        digests = list(windowed(pool, partial(digest_part, names=names), parts(fd), window))
    check_sha256(file, whole.hexdigest())
    return digest_object(file.sha256, digests)
