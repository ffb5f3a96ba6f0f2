"""What Prefect and pydantic raise about the surroundings of a command, told in words: the server, and variables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from ckptflow.errors import CkptflowError, UsageError


@contextmanager
def settings_told() -> Iterator[None]:
    """Say in words that a variable or a profile holds what Prefect, or ckptflow, can't take; both look when imported.

    Raises:
        UsageError: one does.
    """
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UsageError(
            "a setting in the environment is refused",
            expected=first["msg"],
            found=f"{'.'.join(str(part) for part in first['loc'])} of {error.title}",  # its value may be a secret
            fix="correct the variable of that name, CKPTFLOW_… or PREFECT_…, or the profile of Prefect",
        ) from error


@contextmanager
def server_told() -> Iterator[None]:
    """Say in words that a Prefect server is away, or of another version.

    Raises:
        CkptflowError: it is.
    """
    import httpx

    try:
        yield
    except (httpx.HTTPError, RuntimeError) as error:
        from prefect.settings import get_current_settings

        fix = "check PREFECT_API_URL, and that it runs"
        if not get_current_settings().api.url:  # then it was one of our own
            fix = f"{get_current_settings().home} must be writable and have room; or name a server by PREFECT_API_URL"
        raise CkptflowError("the Prefect server can't be reached", found=error, fix=fix) from error
