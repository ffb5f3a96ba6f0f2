"""The plan of a conversion, made once per process and shared by its tasks.

Tasks get a request and a fingerprint, not a plan: a plan is large, and making it again takes milliseconds. Any
process that sees the same file system makes the same one; the fingerprint proves it.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache

from ckptflow.conversion import Conversion, plan_conversion
from ckptflow.errors import SourceChangedError
from ckptflow.request import ConvertRequest


def plan_anew(request: ConvertRequest) -> Conversion:
    """Plan from the files as they are now."""
    _planned.cache_clear()
    return _planned(request)


def planned(request: ConvertRequest, fingerprint: str, sources: str | None = None) -> Conversion:
    """The conversion that ``plan_anew`` made, here or in another process.

    Args:
        request: what it was made from.
        fingerprint: of the conversion.
        sources: ``state_of_sources`` of the plan of another process, which this one may have planned at another time.

    Raises:
        SourceChangedError: the checkpoint is not the one that was planned.
    """
    for plan in (_planned, plan_anew):
        conversion = plan(request)
        if conversion.fingerprint == fingerprint and sources in (None, state_of_sources(conversion)):
            return conversion
    raise SourceChangedError(
        "the checkpoint changed while it was processed",
        file=request.path,
        fix="wait until the trainer is done with it, then run again; where workers on other machines merge it, "
        "see that they have the same file system at the same path",
    )


def state_of_sources(conversion: Conversion) -> str:
    """sha256 over path, size and modification time of all source files, in hex.

    Fingerprints leave times out, so that a copy of a checkpoint is the same checkpoint. Within one run nobody may touch
    a file, whatever its content.
    """
    files = sorted((file.path, file.nbytes, file.mtime_ns) for file in conversion.manifest.files)
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


@lru_cache(maxsize=4)
def _planned(request: ConvertRequest) -> Conversion:
    return plan_conversion(request)
