"""Whether the model of a checkpoint is at its destination already."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ckptflow.discovery.destinations import destination_of
from ckptflow.errors import CheckpointError, PublishError
from ckptflow.fingerprint import fingerprint_file, source_file
from ckptflow.formats.base import Location
from ckptflow.publish.model import MARKER_NAME, parse_marker
from ckptflow.publish.records import PublishedModel
from ckptflow.publish.settings import PublishSettings
from ckptflow.publish.several import Destination
from ckptflow.publish.targets import open_target


def is_published(
    location: Location,
    destination_uri: str,
    settings: PublishSettings | None = None,
    recipe: Mapping[str, object] | None = None,
) -> bool:
    """Whether the marker at the destination names this checkpoint's files with their fingerprints.

    The marker is put last, so that its presence says that all else is there.

    Args:
        location: the checkpoint.
        destination_uri: destination that may hold the models of many checkpoints.
        settings: how to ask it.
        recipe: the options of the conversion (``conversion.recipe_of``); another recipe's model doesn't count then.

    Raises:
        PublishError: the destination can't be asked.
    """
    with closing(open_target(destination_of(location, destination_uri), settings or PublishSettings())) as target:
        content = target.read_file(MARKER_NAME)
    record = _parsed(content)
    if recipe is not None and json.loads(json.dumps(recipe)) != record.get("recipe"):
        return False
    source = record.get("source")
    files = source.get("files") if isinstance(source, dict) else None
    if not isinstance(files, dict) or not files:
        return False
    return all(isinstance(entry, dict) and _is_same(location.root / name, entry) for name, entry in files.items())


def published_model(destination: Destination) -> PublishedModel | None:
    """The model that the marker at one model's place tells of; None where there is none.

    Raises:
        PublishError: the destination can't be asked.
    """
    with closing(open_target(destination.uri, destination.settings)) as target:
        content = target.read_file(MARKER_NAME)
        revision = target.revision
    if content is None:
        return None
    marker = parse_marker(content)
    return PublishedModel(
        uri=destination.uri,
        fingerprint=marker.fingerprint,
        bytes=sum(size for size, _ in marker.files.values()) + len(content),
        files=len(marker.files) + 1,
        revision=revision,
    )


def is_published_at_all(
    location: Location,
    destinations: Sequence[Destination],
    ask: Callable[[Location, Destination], bool] | None = None,
) -> bool:
    """Whether the model is at each of the destinations. One that lacks it decides, whatever the others can't tell.

    Args:
        location: the checkpoint.
        destinations: that may hold the models of many checkpoints.
        ask: in place of ``is_published``.

    Raises:
        PublishError, OSError: a destination or the checkpoint's files can't tell, and no destination lacks the model.
    """
    unknown: Exception | None = None
    for destination in destinations:
        try:
            if ask is None:
                answer = is_published(location, destination.uri, destination.settings)
            else:
                answer = ask(location, destination)
        except (PublishError, OSError) as error:
            unknown = unknown or error
            continue
        if not answer:
            return False
    if unknown is not None:
        raise unknown
    return True


def _parsed(content: bytes | None) -> dict[str, Any]:
    """The record in a marker; empty where there is none, or something else under its name."""
    try:
        record = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _is_same(path: Path, entry: Mapping[str, object]) -> bool:
    try:
        file = source_file(path)
    except (CheckpointError, ValueError):  # a name that no file system takes
        return False
    return file.nbytes == entry.get("bytes") and fingerprint_file(file) == entry.get("fingerprint")
