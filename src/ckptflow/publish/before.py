"""A destination before the work for a model begins: what its upload would refuse in the end is refused now."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from ckptflow.output.record import INDEX_SUFFIX
from ckptflow.publish import refusals
from ckptflow.publish.model import Marker, marker_in
from ckptflow.publish.place import Place, check_free, look_at
from ckptflow.publish.several import Destination
from ckptflow.publish.targets import Target, open_target

if TYPE_CHECKING:
    from ckptflow.conversion import Conversion


def check_before_work(conversion: Conversion, destination: Destination) -> None:
    """Refuse now what an upload of a model that is only planned would refuse at its end.

    Nothing is left there. What changes until the upload, the upload finds: it asks the same questions.

    Raises:
        DestinationTakenError: the destination holds something else.
        PublishError: it can't be asked, or its rights don't do for an upload.
    """
    with closing(open_target(destination.uri, destination.settings)) as target:
        place = look_at(target)
        mine = Marker(fingerprint=conversion.fingerprint, files={})
        there = marker_in(place.marker_content)
        if there is None or there.fingerprint != mine.fingerprint:
            check_free(target.uri, place, mine, names_of(conversion), overwrite=destination.overwrite)
            if not destination.overwrite:
                _check_side_files(conversion, target, place)
        target.check_rights()


def names_of(conversion: Conversion) -> set[str]:
    """Names of all files that the model will have, but for the marker."""
    weights = {file.name for file in conversion.plan.files}
    return weights | set(conversion.side) | ({f"model{INDEX_SUFFIX}"} if len(weights) > 1 else set())


def _check_side_files(conversion: Conversion, target: Target, place: Place) -> None:
    """Files by which one model without a marker differs from another: what the weights hold is not known yet."""
    there = [name for name in conversion.side if name in place.listing]
    differing = [name for name in there if target.read_file(name) != conversion.side[name]]
    if differing:
        raise refusals.foreign_files(target.uri, differing)
