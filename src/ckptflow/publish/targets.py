"""Where models go: one small protocol, one module per kind of store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from ckptflow.errors import UsageError
from ckptflow.publish.model import LocalFile, LocalModel
from ckptflow.publish.settings import PublishSettings

#: Called with the number of bytes done since the last call; calls come from one thread at a time. What it raises ends
#: the sending: no further byte goes out.
Progress = Callable[[int], None]


class Target(Protocol):
    """One destination of one model: a flat set of named files, of which a reader never sees half a one.

    Addresses are ``str`` URIs because ``Path`` folds the ``//`` in them. Names have ``/`` between parts. Files appear
    whole or not at all, and never in place of another: what is there must be deleted first.

    A store with commits keeps what is put and deleted until the marker is put, and then shows all of it in one
    commit. Its target answers questions as if each change were made at once.

    All methods raise TransientPublishError for what may heal, after the target's own retries, and
    PermanentPublishError for what does not.
    """

    @property
    def large_files_at_once(self) -> int:
        """How many large files may be put at once: 2 where one's end leaves room for the next one's beginning."""

    @property
    def uri(self) -> str:
        """The destination as it was given; it holds no credentials."""

    @property
    def revision(self) -> str | None:
        """What pins the model as it is now: a commit; None where the store has no such thing."""

    def prepare(self, model: LocalModel) -> None:
        """Called once before a model is sent: refuse now what would be refused at the end, make what must be there."""

    def check_rights(self) -> None:
        """Refuse rights that don't do for an upload, as far as that can be told at once and without leaving a trace."""

    def list_files(self) -> Mapping[str, str]:
        """Name → tag of each file there; a tag changes when the file does. Files in the making are left out."""

    def read_file(self, name: str) -> bytes | None:
        """Content of a small file, or None where there is none."""

    def put_bytes(self, name: str, content: bytes) -> bool:
        """Create a small file, durably. False: there was one already, which was left alone."""

    def put_file(self, file: LocalFile, progress: Progress) -> bool:
        """Create a file from a local one, durably. False: there was one already, which was left alone.

        Raises:
            VerificationError: the local file is not what the record says; nothing is left at the destination.
        """

    def prove_file(self, file: LocalFile) -> str | None:
        """How the file there was proven to be equal to the local one; None where it is absent or differs.

        Raises:
            VerificationError: the local file is not what the record says.
        """

    def delete_file(self, name: str) -> None:
        """Remove a file; nothing happens where there is none."""

    def tidy_file(self, name: str) -> None:
        """Take away what killed runs left half of a file that is there, proven; a run that sends it loses nothing."""

    def close(self) -> None:
        """Let go of connections and threads."""


def open_target(destination_uri: str, settings: PublishSettings) -> Target:
    """The target that a URI names.

    Raises:
        UsageError: no such kind of destination, or the URI does not name one.
    """
    # By hand: "hf://" and what follows is no host to urlsplit.
    scheme = destination_uri.partition("://")[0] if "://" in destination_uri else ""
    try:
        if scheme == "file":
            from ckptflow.publish.local import LocalTarget

            return LocalTarget(destination_uri, settings)
        if scheme == "s3":
            from ckptflow.publish.s3 import S3Target

            return S3Target(destination_uri, settings)
        if scheme == "hf":
            from ckptflow.publish.hub import HubTarget

            return HubTarget(destination_uri, settings)
    except ModuleNotFoundError as error:
        extra = {"s3": "s3", "hf": "hub"}.get(scheme, "all")
        raise UsageError(
            f"{scheme}:// needs a package that is not installed",
            found=f"no module {error.name}",
            fix=f"pip install 'ckptflow[{extra}]'",
        ) from error
    raise UsageError(
        "no such kind of destination",
        expected="file:///DIR, s3://BUCKET/PREFIX or hf://ORG/NAME[@BRANCH]",
        # The rest may hold a password.
        found=f"{scheme}://…" if scheme else "an address without a scheme",
        fix="write a directory as file:///DIR, with its whole path; most stores speak S3's protocol",
    )
