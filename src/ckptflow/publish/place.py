"""What lies at a destination, and whether a model may go there: one rule, before the work and at its end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckptflow.publish import refusals
from ckptflow.publish.model import MARKER_NAME, Marker, marker_in
from ckptflow.publish.targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What was found at a destination: the content of the marker, None where there is none, and name → tag of files."""

    marker_content: bytes | None
    listing: Mapping[str, str]

    def foreign(self, names: Collection[str]) -> list[str]:
        """Files that are not of a model with these names."""
        return sorted(set(self.listing) - set(names) - {MARKER_NAME})


def look_at(target: Target) -> Place:
    """The marker first: whoever sees it also sees, in a later listing, all that was put before it."""
    content = target.read_file(MARKER_NAME)
    return Place(marker_content=content, listing=target.list_files())


def check_free(uri: str, place: Place, mine: Marker, names: Collection[str], *, overwrite: bool) -> None:
    """Refuse a place with something that this model, which is not published there, may not take the place of.

    Args:
        uri: of the place.
        place: what is there.
        mine: of the model; its files need not be known yet.
        names: of all files that the model has.
        overwrite: as for ``upload``.

    Raises:
        DestinationTakenError: another model, a trainer's checkpoint, or files of somebody else.
    """
    foreign = place.foreign(names)
    refusals.check_no_training(uri, foreign)
    if overwrite:
        return
    if place.marker_content is not None:
        raise refusals.other_model(uri, mine, marker_in(place.marker_content))
    if foreign:
        raise refusals.foreign_files(uri, foreign)
