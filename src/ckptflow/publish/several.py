"""One model, several destinations: each ends for itself, and one that fails undoes no other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ckptflow.discovery.destinations import destination_of
from ckptflow.errors import CkptflowError, TransientPublishError, UsageError
from ckptflow.publish.model import read_local_model
from ckptflow.publish.records import PublishRecord
from ckptflow.publish.settings import PublishSettings
from ckptflow.publish.targets import Progress
from ckptflow.publish.upload import upload

if TYPE_CHECKING:
    from ckptflow.formats.base import Location

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where a model goes, and how; ``overwrite`` as for ``upload``.

    Where models of many checkpoints are meant, ``for_checkpoint`` gives the place of one of them.
    """

    uri: str
    settings: PublishSettings = field(default_factory=PublishSettings)
    overwrite: bool = False

    def with_credentials_at_hand(self) -> Destination:
        """The same with credentials that were asked for now, once, for many questions in a row."""
        return replace(self, settings=self.settings.with_credentials_at_hand())

    def for_checkpoint(self, location: Location) -> Destination:
        """The place of one checkpoint's model under a destination that holds many."""
        return replace(self, uri=destination_of(location, self.uri))


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationOutcome:
    """What became of one destination: the error that ended it, or the record of what this call sent or found."""

    uri: str
    record: PublishRecord | None = None
    error: Exception | None = None

    @property
    def state(self) -> Literal["published", "failed"]:
        """``failed`` says nothing of what is there: the next run finds out, and goes on with it."""
        return "published" if self.error is None else "failed"

    @property
    def may_heal(self) -> bool:
        """Whether it failed in a way for which another try is worth it."""
        return isinstance(self.error, TransientPublishError)


def publish_all(
    out_dir: Path,
    destinations: Sequence[Destination],
    *,
    progress: Callable[[str], Progress | None] | None = None,
) -> list[DestinationOutcome]:
    """Publish to each destination in turn, whatever became of those before.

    Args:
        out_dir: directory with weight files and ``ckptflow.json``.
        destinations: in the order of publishing; each URI once.
        progress: gives, for a URI, what is called with bytes done.

    Returns:
        One outcome per destination, in the same order. Nothing is raised for a destination that failed.

    Raises:
        OutputError, VerificationError: the local directory is not what its record says, before anything is sent.
        UsageError: a destination is named twice, or there is none.
    """
    check_each_once([destination.uri for destination in destinations])
    read_local_model(out_dir)
    outcomes = []
    for destination in destinations:
        told = None if progress is None else progress(destination.uri)
        outcomes.append(_publish(out_dir, destination, told))
    return outcomes


def check_each_once(uris: Sequence[str]) -> None:
    """Refuse destinations of which two are one, or of which there is none.

    Raises:
        UsageError: naming them.
    """
    places = [uri.rstrip("/") for uri in uris]
    twice = sorted({place for place in places if places.count(place) > 1})
    if twice or not places:
        found = ", ".join(twice) or "none"
        fix = "leave out what is named twice" if twice else "name a destination with --to"
        raise UsageError("each destination once, and at least one", found=found, fix=fix)


def destinations_from(uris: Sequence[str], s3_endpoint_url: str | None = None) -> tuple[Destination, ...]:
    """Destinations of a command line, of which those on S3 have the same endpoint.

    Raises:
        UsageError: one is named twice, or there is none, or the endpoint is not one.
    """
    check_each_once(uris)
    on_s3 = PublishSettings(endpoint_url=s3_endpoint_url)
    return tuple(Destination(uri=uri, settings=on_s3 if uri.startswith("s3:") else PublishSettings()) for uri in uris)


def told_in_words(label: str, outcomes: Sequence[DestinationOutcome]) -> str:
    """One sentence about all destinations of a model: first what failed and why, then what is published."""
    failed = [f"{each.uri} ({_one_line(each.error)})" for each in outcomes if each.state == "failed"]
    published = ", ".join(each.uri for each in outcomes if each.state == "published")
    parts = [f"is not published at {', nor at '.join(failed)}"] if failed else []
    parts += [f"is published at {published}"] if published else []
    return f"{label} {'; it '.join(parts)}"


def _one_line(error: Exception | None) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines()) or type(error).__name__


def _publish(out_dir: Path, destination: Destination, progress: Progress | None) -> DestinationOutcome:
    try:
        record = upload(
            out_dir,
            destination.uri,
            settings=destination.settings,
            progress=progress,
            overwrite=destination.overwrite,
        )
    except CkptflowError as error:
        _log.warning("%s: not published: %s", destination.uri, error.what)
        return DestinationOutcome(uri=destination.uri, error=error)
    return DestinationOutcome(uri=destination.uri, record=record)
