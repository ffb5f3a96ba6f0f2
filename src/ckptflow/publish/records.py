"""What was published: the facts that a caller shows, stores or sends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFile:
    """One file at the destination.

    Attributes:
        name: name under the destination, with ``/`` between parts.
        bytes: size in bytes.
        sha256: hex digest of the content.
        verified_by: how the copy was proven equal to the local file.
        outcome: ``sent`` by this run, or ``skipped`` because it was there already.
    """

    name: str
    bytes: int
    sha256: str
    verified_by: str
    outcome: Literal["sent", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """One model at one destination, in a few figures: for events, and for results of runs.

    Attributes:
        uri: the destination.
        fingerprint: the model's, as in ``ckptflow.json``.
        bytes: of all files.
        files: number of files, the marker among them.
        revision: the commit that holds the model, for destinations that have commits.
    """

    uri: str
    fingerprint: str
    bytes: int
    files: int
    revision: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRecord:
    """One model at one destination, proven.

    Attributes:
        uri: the destination as it was given.
        state: always ``published``: what is not, raises.
        already_published: the marker of the same model was there already; nothing was changed.
        fingerprint: the model's fingerprint, as in ``ckptflow.json``.
        files: all files, the marker last.
        seconds: wall time of the call.
        revision: the commit that holds the model, for destinations that have commits.
    """

    uri: str
    state: Literal["published"]
    already_published: bool
    fingerprint: str
    files: tuple[PublishedFile, ...]
    seconds: float
    revision: str | None = None

    @property
    def model(self) -> PublishedModel:
        """The same in a few figures."""
        return PublishedModel(
            uri=self.uri,
            fingerprint=self.fingerprint,
            bytes=self.total_bytes,
            files=len(self.files),
            revision=self.revision,
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of all files at the destination."""
        return sum(file.bytes for file in self.files)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this run sent."""
        return sum(file.bytes for file in self.files if file.outcome == "sent")
