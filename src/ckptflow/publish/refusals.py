"""The errors of an upload that are about the destination, in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ckptflow.errors import DestinationTakenError, TransientPublishError
from ckptflow.publish.model import MARKER_NAME, LocalFile, Marker, is_training_name

HOW_TO_OVERWRITE = "`upload --overwrite`, or `,overwrite=true` behind a destination of `run`, `watch` and `deploy`"


def other_model(uri: str, mine: Marker, other: Marker | None) -> DestinationTakenError:
    """A marker that is not this model's; ``other`` is None where it does not parse."""
    return DestinationTakenError(
        "the destination holds another model",
        file=f"{uri}: {MARKER_NAME}",
        expected=f"nothing, or the model with fingerprint {mine.fingerprint}",
        found="a record that does not parse" if other is None else _difference(other, mine),
        fix="choose another destination (two runs of one name want one each), or replace that model: "
        f"{HOW_TO_OVERWRITE}",
    )


def foreign_files(uri: str, names: Collection[str]) -> DestinationTakenError:
    """Files that are not this model's, without a marker."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return DestinationTakenError(
        "the destination holds files that are not of this model",
        file=uri,
        expected="nothing, or files of this model with the same content",
        found=", ".join(sorted(names)[:5]) + more,
        fix=f"choose an empty destination, or overwrite: {HOW_TO_OVERWRITE}",
    )


def check_no_training(uri: str, names: Iterable[str]) -> None:
    """Let another model's files be replaced, and never a checkpoint, which no model gives back.

    Raises:
        DestinationTakenError: files of a training are among those at the destination.
    """
    found = sorted(filter(is_training_name, names))
    if found:
        raise DestinationTakenError(
            "the destination holds a checkpoint of a trainer, which is never overwritten",
            file=uri,
            found=", ".join(found[:5]),
            fix="choose another destination, or move that away",
        )


def overtaken(uri: str, found: str) -> DestinationTakenError:
    """Another model came to the same destination while this one was sent."""
    return DestinationTakenError(
        "another run writes another model to the same destination",
        file=uri,
        found=found,
        fix="give each model a destination of its own",
    )


def disturbed(uri: str, found: str) -> TransientPublishError:
    """Files went or changed while this model was sent."""
    return TransientPublishError(
        "the destination changed during the upload",
        file=uri,
        found=found,
        fix="run it again; it finds out what is there now",
    )


def not_held(uri: str, file: LocalFile) -> TransientPublishError:
    """A file that was sent reads back as something else."""
    return TransientPublishError(
        "the store does not hold what was sent",
        file=f"{uri}: {file.name}",
        expected=f"{file.bytes} bytes, sha256 {file.sha256}",
        found="something else, or nothing",
        fix="run it again; if it comes back, the store or something before it changes files",
    )


def _difference(other: Marker, mine: Marker) -> str:
    if other.fingerprint != mine.fingerprint:
        return f"that of {other.source or 'some checkpoint'}, fingerprint {other.fingerprint}"
    names = sorted(name for name in {*other.files, *mine.files} if other.files.get(name) != mine.files.get(name))
    return f"the same source and recipe, but other bytes in {', '.join(names[:5])}"
