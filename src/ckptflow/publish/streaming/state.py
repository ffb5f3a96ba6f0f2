"""What a streaming upload keeps on the local disk: a few KB per weight file, so that a kill costs one file at most."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptflow.engine.record import WeightFileRecord
from ckptflow.errors import CheckpointError
from ckptflow.files.jsonfiles import read_json_object, write_json
from ckptflow.output.workspace import Workspace
from ckptflow.publish.streaming.streamed import Memory, Streamed


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """Digests and open uploads of the weight files of one model at one destination.

    They tell what to look for and prove nothing: whether an object is there, and is that one, the store is asked.

    Attributes:
        workspace: of the conversion; it belongs to one fingerprint, so that another plan's digests are never met.
        uri: the destination that they are of.
    """

    workspace: Workspace
    uri: str

    def streamed(self, name: str) -> Streamed | None:
        """What was streamed under that name, if it came so far that the object may be there."""
        try:
            found = read_json_object(self._path(name, "streamed"))
            streamed = Streamed(
                record=WeightFileRecord.from_json(found["record"]),
                part_bytes=found["part_bytes"],
                digests=dict(found["digests"]),
                outcome=found["outcome"],
            )
        except (CheckpointError, KeyError, TypeError, ValueError):
            return None  # none, or one that a crash tore: the file is produced again, and compared
        return streamed if found.get("uri") == self.uri else None

    def keep(self, streamed: Streamed) -> None:
        """Remember a file's digests, durably."""
        content = {
            "uri": self.uri,
            "part_bytes": streamed.part_bytes,
            "digests": dict(streamed.digests),
            "outcome": streamed.outcome,
            "record": streamed.record.to_json(),
        }
        write_json(self._path(streamed.record.name, "streamed"), content)

    def memory(self, name: str) -> Memory:
        """What sending a file under that name needs to know and to leave behind."""

        def keep_upload_id(upload_id: str) -> None:
            write_json(self._path(name, "upload"), {"uri": self.uri, "upload_id": upload_id})

        return Memory(upload_id=self._upload_id(name), keep_upload_id=keep_upload_id, keep_streamed=self.keep)

    @property
    def needs_md5(self) -> bool:
        """Whether the server was seen to take checksums and not to give them back, so that it proves by MD5s only."""
        return self._path("server", "md5").exists()

    def keep_md5_need(self) -> None:
        """Remember it for the files that follow: without MD5s each would have to be read back."""
        write_json(self._path("server", "md5"), {"uri": self.uri})

    def _upload_id(self, name: str) -> str | None:
        try:
            found = read_json_object(self._path(name, "upload"))
        except CheckpointError:
            return None
        upload_id = found.get("upload_id")
        return upload_id if found.get("uri") == self.uri and isinstance(upload_id, str) else None

    def _path(self, name: str, kind: str) -> Path:
        return self.workspace.records / f"{name}.{kind}.json"
