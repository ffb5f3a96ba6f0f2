"""Secrets that a caller brings itself, instead of those that the AWS and Hugging Face tools find by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ckptflow.errors import PermanentPublishError


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What one store asks for. Only the region is ever shown.

    Attributes:
        hub_token: of the Hugging Face Hub.
        access_key_id: of S3, with ``secret_access_key``, and ``session_token`` where the keys are temporary.
        region: of S3, where the settings name none.
    """

    hub_token: str | None = field(default=None, repr=False)
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    region: str | None = None


#: Asked each time that a connection is opened, so that what holds settings holds no secret.
CredentialsSource = Callable[[], Credentials]

#: The usual names in the environment → the fields here.
USUAL_NAMES = {
    "HF_TOKEN": "hub_token",
    "AWS_ACCESS_KEY_ID": "access_key_id",
    "AWS_SECRET_ACCESS_KEY": "secret_access_key",
    "AWS_SESSION_TOKEN": "session_token",
    "AWS_REGION": "region",
    "AWS_DEFAULT_REGION": "region",
}


def credentials_named(values: Mapping[str, object], where: str) -> Credentials:
    """Credentials from their usual names in the environment.

    Args:
        values: names and values; empty ones are left out.
        where: they come from, for the message.

    Raises:
        PermanentPublishError: there are other names, or values that are not text. Neither is shown: a secret may have
            been put in the wrong place.
    """
    given = {name: value for name, value in values.items() if value not in (None, "")}
    if not given or set(given) - set(USUAL_NAMES) or not all(isinstance(value, str) for value in given.values()):
        raise PermanentPublishError(
            "these are no credentials",
            file=where,
            expected=f"texts under some of the names {', '.join(USUAL_NAMES)}, and no others",
            fix="correct what is stored there",
        )
    return Credentials(**{USUAL_NAMES[name]: str(value) for name, value in given.items()})
