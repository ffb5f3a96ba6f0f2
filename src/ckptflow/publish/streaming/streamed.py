"""A file that is sent while it is produced: what gives its bytes, what proves it, and what a kill leaves of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckptflow.engine.inorder import InOrder
from ckptflow.engine.record import WeightFileRecord
from ckptflow.publish.digests import DigestName
from ckptflow.publish.model import LocalFile

#: Gives a file's bytes to a stream, from the first to the last; the same bytes at each call.
Produce = Callable[[InOrder], WeightFileRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """A file that is at its destination, with the digests that prove it.

    Attributes:
        record: what was produced.
        part_bytes: size of the parts that the digests are made of.
        digests: as ``ObjectDigest.digests``.
        outcome: ``sent`` by this run or one that was killed, or ``skipped`` because somebody else had put it there.
    """

    record: WeightFileRecord
    part_bytes: int
    digests: Mapping[DigestName, str]
    outcome: Literal["sent", "skipped"]

    @property
    def file(self) -> LocalFile:
        """The file as its proof wants it; its relative path says that its bytes are nowhere."""
        record = self.record
        return LocalFile(name=record.name, path=Path(record.name), bytes=record.nbytes, sha256=record.sha256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a killed run leaves for the next one: the open upload, and the digests of what may be there whole.

    Attributes:
        upload_id: the multipart upload that was begun, if any.
        keep_upload_id: called, before a part is sent, with the id of the upload that is used.
        keep_streamed: called with the digests before the object appears.
    """

    upload_id: str | None
    keep_upload_id: Callable[[str], None]
    keep_streamed: Callable[[Streamed], None]
