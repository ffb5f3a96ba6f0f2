"""Whether a checkpoint's model is at a destination for certain, so that the local files may go."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ckptflow.discovery.destinations import destination_of
from ckptflow.errors import CheckpointError
from ckptflow.files.jsonfiles import parse_json_object
from ckptflow.fingerprint import relative_name
from ckptflow.formats.base import Location, ReadOptions
from ckptflow.formats.registry import read
from ckptflow.publish.model import MARKER_NAME, parse_marker
from ckptflow.publish.settings import PublishSettings
from ckptflow.publish.status import is_published
from ckptflow.publish.targets import open_target


def why_unproven(
    location: Location, unit: Path, destination_uri: str, settings: PublishSettings | None = None
) -> str | None:
    """What speaks against the claim that this checkpoint is published; None where it is proven.

    Proven is: the marker there names every file with weights of this checkpoint with its fingerprint, every file that
    the marker lists is there, and the destination doesn't lie inside the step that is to go.

    Args:
        location: the checkpoint.
        unit: the directory or file that would be deleted.
        destination_uri: as for ``upload`` and ``run``.
        settings: how to reach it.

    Raises:
        PublishError: the destination can't be asked.
    """
    uri = destination_of(location, destination_uri)
    if _is_inside(uri, unit):
        return f"{uri} lies inside it"
    if not is_published(location, destination_uri, settings):
        return f"no marker with its fingerprints at {uri}"
    with closing(open_target(uri, settings or PublishSettings())) as target:
        content = target.read_file(MARKER_NAME)
        listed = target.list_files()
    try:
        marker = parse_marker(content or b"")
        named = parse_json_object(content or b"", uri)["source"]["files"]
        wanted = [relative_name(file, location.root) for file in read(location, ReadOptions()).files]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return f"the marker at {uri} does not parse: {error}"
    except CheckpointError as error:
        return f"it can't be read: {error.what}"
    missing = sorted(set(marker.files) - set(listed))
    if missing:
        return f"{missing[0]} is gone from {uri}"
    unnamed = sorted(set(wanted) - set(named))
    return f"the marker at {uri} doesn't name {unnamed[0]}" if unnamed else None


def _is_inside(uri: str, unit: Path) -> bool:
    parts = urlsplit(uri)
    if parts.scheme != "file":
        return False
    return Path(os.path.realpath(unquote(parts.path))).is_relative_to(os.path.realpath(unit))
