"""How to publish: everything that a person may want to set, none of it secret."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal
from urllib.parse import urlsplit

from ckptflow.errors import UsageError
from ckptflow.publish.credentials import Credentials, CredentialsSource

MIB = 1 << 20

#: Smaller parts only cost requests; S3 itself refuses parts below 5 MiB.
MIN_PART_SIZE_BYTES = 8 * MIB

ChecksumMode = Literal["when_supported", "when_required"]
VerifyMode = Literal["auto", "full", "size"]
Visibility = Literal["private", "public"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSettings:
    """Settings of an upload, none of them secret. Credentials come from where the AWS and HF tools look for them.

    Attributes:
        verify: how a finished file is proven. ``auto``: size and the server's checksum, or a sha256 of the bytes
            read back where the server gives none. ``full``: always the sha256 of the bytes read back. ``size``:
            size, and on S3 the sha256 that was stored beside the object.
        endpoint_url: S3 or Hub endpoint; None takes ``AWS_ENDPOINT_URL`` or the AWS profile, then AWS itself; for
            the Hub ``HF_ENDPOINT``, then huggingface.co.
        region: S3 region; None takes the environment or the AWS profile.
        path_style: bucket in the path instead of the host name; None chooses it for endpoints that are not AWS.
        checksum_mode: ``when_supported`` sends a CRC-64/NVME with each part, or a SHA-256 to a server that doesn't
            know that; ``when_required`` a Content-MD5, for servers that know neither; None takes
            ``AWS_REQUEST_CHECKSUM_CALCULATION``, then the first.
        part_size_bytes: wanted size of a part; it is raised where a file would need more than 10,000 parts.
        max_concurrency: parts in flight at once.
        memory_budget_bytes: bound on part bytes in memory; large parts lower the concurrency.
        connect_timeout_seconds: time to open a connection.
        read_timeout_seconds: time without a byte from the server.
        max_attempts: tries of one request that fails with what may heal.
        backoff_seconds: first wait between tries; it doubles, with jitter.
        backoff_limit_seconds: longest wait between tries.
        visibility: of a Hub repository; one that is there and public is refused unless ``public`` is asked for.
        license: the model card's license, as the Hub names it (``apache-2.0``); None leaves it out.
        base_model_id: the model card's base model, a Hub id (``org/name``); None leaves it out.
        credentials: gives the credentials instead, when a connection is opened.
    """

    verify: VerifyMode = "auto"
    endpoint_url: str | None = None
    region: str | None = None
    path_style: bool | None = None
    checksum_mode: ChecksumMode | None = None
    part_size_bytes: int = 16 * MIB
    max_concurrency: int = 8
    memory_budget_bytes: int = 512 * MIB
    connect_timeout_seconds: float = 10.0
    read_timeout_seconds: float = 60.0
    max_attempts: int = 6
    backoff_seconds: float = 0.5
    backoff_limit_seconds: float = 30.0
    visibility: Visibility = "private"
    license: str | None = None
    base_model_id: str | None = None
    credentials: CredentialsSource | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, least in (
            ("part_size_bytes", MIN_PART_SIZE_BYTES),
            ("max_concurrency", 1),
            ("max_attempts", 1),
            ("memory_budget_bytes", MIN_PART_SIZE_BYTES),
        ):
            if getattr(self, name) < least:
                raise UsageError(
                    f"{name} is too small",
                    expected=f"at least {least}",
                    found=getattr(self, name),
                    fix=f"raise {name}",
                )
        if self.endpoint_url is not None:
            check_endpoint(self.endpoint_url)

    def with_credentials_at_hand(self) -> PublishSettings:
        """The same settings with credentials that were asked for now, once, for many connections in a row."""
        if self.credentials is None:
            return self
        return replace(self, credentials=_Held(self.credentials()))


@dataclass(frozen=True, slots=True)
class _Held:
    """Gives what it was given."""

    credentials: Credentials

    def __call__(self) -> Credentials:
        return self.credentials


def check_endpoint(endpoint_url: str) -> None:
    """Raise UsageError where an endpoint URL is none, or holds a password, which would end up in messages."""
    parts = urlsplit(endpoint_url)
    if "@" in parts.netloc:
        raise UsageError(
            "the endpoint URL holds a user name or password",
            fix="give credentials by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, an AWS profile, or HF_TOKEN",
        )
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(
            "the endpoint URL is not one",
            expected="http://HOST[:PORT] or https://…",
            found=endpoint_url,
            fix="correct --endpoint-url, AWS_ENDPOINT_URL, the AWS profile or HF_ENDPOINT",
        )
