"""Whether models may be made without a local copy of them: rules for parameters and for the command line."""

from __future__ import annotations

from collections.abc import Sequence

from ckptflow.errors import UsageError


def check_local_copy(uris: Sequence[str], *, keep_local: bool, no_local_copy: bool) -> None:
    """Refuse what can't be done without a local copy, where there shall be none.

    Raises:
        UsageError: a local copy is to be kept, or there is anything but one destination on S3.
    """
    if not no_local_copy:
        return
    if keep_local:
        raise UsageError(
            "a local copy can't be kept and left out",
            found="--keep-local and --no-local-copy",
            fix="leave one of them out",
        )
    others = [uri for uri in uris if not uri.startswith("s3://")]
    if others or len(uris) != 1:
        raise UsageError(
            "without a local copy, a model goes to one destination, on S3",
            expected="one s3://BUCKET/PREFIX",
            found=f"{len(uris)} destinations" if len(uris) != 1 else f"{uris[0].partition('://')[0]}://…",
            fix="leave out --no-local-copy, or publish to one place on S3 and copy it from there",
        )
