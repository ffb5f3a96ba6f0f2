"""A client of S3 that retries what may heal, and never tells a secret.

It is botocore's own: what boto3 adds to it is not used, and takes time to import.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import Session, get_session

from ckptflow.errors import PermanentPublishError, PublishError, TransientPublishError
from ckptflow.publish.digests import DigestName, PartDigest, digest_part
from ckptflow.publish.s3_errors import error_code, is_checksum_refusal, is_condition_refusal, judge
from ckptflow.publish.settings import PublishSettings, check_endpoint
from ckptflow.publish.verdicts import delay_seconds

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_WITH_CONDITION = frozenset({"PutObject", "CompleteMultipartUpload"})
_WITH_CHECKSUM = frozenset(
    {"PutObject", "UploadPart", "CreateMultipartUpload", "CompleteMultipartUpload", "HeadObject"}
)

#: What a server is asked to check, in the order of trying: the first costs the least by far, and not all know it.
CHECKSUMS: tuple[DigestName, ...] = ("CRC64NVME", "SHA256")
#: Names in requests and answers, of parts and of objects.
CHECKSUM_FIELDS: Mapping[DigestName, str] = {
    "CRC64NVME": "ChecksumCRC64NVME",
    "SHA256": "ChecksumSHA256",
    "MD5": "ContentMD5",
}

_Style = Literal["path", "virtual", "auto"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class S3Caller:
    """Runs requests against one endpoint.

    ``checksum`` is what a server is asked to check: it starts as asked for, and where the server says that it does not
    know the header the next of ``CHECKSUMS`` takes its place for good, at last None, which is a Content-MD5.
    ``is_conditional`` is switched off for good in the same way. Actions read both anew on each try.
    ``gives_checksums`` is switched off when the server takes checksums and does not give them back.
    """

    def __init__(self, settings: PublishSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._secrets: tuple[str, ...] = ()
        self.is_conditional = True
        mode = settings.checksum_mode or os.environ.get("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
        self.gives_checksums = True
        self.checksum = CHECKSUMS[0] if mode.lower() == "when_supported" else None
        try:
            session = _open_session(settings)
            credentials = session.get_credentials()
            if credentials is not None:
                frozen = credentials.get_frozen_credentials()
                # Longest first, so that one that holds another is found whole.
                found = [value for value in (frozen.access_key, frozen.secret_key, frozen.token) if value]
                self._secrets = tuple(sorted(found, key=len, reverse=True))
            self.client = _make_client(session, settings)
        except (BotoCoreError, ValueError) as error:
            raise self._final_error(error, "can't open a connection to S3", "") from None

    @property
    def digest_names(self) -> frozenset[DigestName]:
        """What is made of each part: the checksum, and the MD5 where files are proven by their ETags."""
        if self.checksum is None:
            return frozenset({"MD5"})
        return frozenset({self.checksum} if self.gives_checksums else {self.checksum, "MD5"})

    def checksum_of(self, content: bytes | bytearray, digest: PartDigest) -> dict[str, str]:
        """The argument of a request that makes the server check the bytes that it gets.

        Args:
            content: the bytes.
            digest: of these bytes; made anew where the server asked for another one meanwhile.
        """
        name: DigestName = self.checksum or "MD5"
        made = digest if name in digest.digests else digest_part(content, [name])
        return {CHECKSUM_FIELDS[name]: made.text(name)}

    def close(self) -> None:
        """Close the connections; a request that is on its way is not tried again."""
        self._closed.set()
        self.client.close()

    def run(self, action: Callable[[S3Client], _T], *, what: str, where: str, passing: tuple[str, ...] = ()) -> _T:
        """Run one request, with retries.

        Args:
            action: does the request; may be called several times.
            what: what fails if it fails, for the message.
            where: bucket and key, for the message.
            passing: error codes that are answers to the caller, raised as they are.

        Raises:
            TransientPublishError: it failed ``max_attempts`` times.
            PermanentPublishError: it will not heal.
            ClientError: one of ``passing``.
        """
        attempt = 1
        while True:
            # Noted before the request: of several in flight, each refused one has its second try.
            conditional, checksum = self.is_conditional, self.checksum
            try:
                return action(self.client)
            except ClientError as error:
                if error_code(error) in passing:
                    raise
                if self._step_back(error, was_conditional=conditional, sent_checksum=checksum):
                    continue
                failure: BotoCoreError | ClientError = error
            except BotoCoreError as error:
                failure = error
            verdict = judge(failure)
            if not verdict.may_heal or attempt >= self._settings.max_attempts:
                raise self._final_error(failure, what, where) from self._cause(failure)
            delay = delay_seconds(self._settings, attempt, verdict.retry_after_seconds)
            _log.info("%s: %s; tried again in %.1f s", where, self._scrub(verdict.found), delay)
            if self._closed.wait(delay):
                raise self._final_error(failure, what, where) from self._cause(failure)
            attempt += 1

    def _step_back(self, error: ClientError, *, was_conditional: bool, sent_checksum: DigestName | None) -> bool:
        """Leave out a header that the server does not know; True when the request is worth another try."""
        # Some servers say NotImplemented and not of what: the checksums go first, then the condition.
        is_nameless = sent_checksum is None and error_code(error) == "NotImplemented"
        is_refusal = is_condition_refusal(error) or is_nameless
        if was_conditional and error.operation_name in _WITH_CONDITION and is_refusal:
            with self._lock:
                is_news, self.is_conditional = self.is_conditional, False
            if is_news:
                _log.warning(
                    "the server does not know If-None-Match; two uploads at once are only told apart by a look (%s)",
                    self.told(error),
                )
            return True
        if sent_checksum is not None and error.operation_name in _WITH_CHECKSUM and is_checksum_refusal(error):
            with self._lock:
                is_news = self.checksum == sent_checksum
                if is_news:
                    self.checksum = next(iter(CHECKSUMS[CHECKSUMS.index(sent_checksum) + 1 :]), None)
            if is_news:
                instead = f"{self.checksum} instead" if self.checksum else "as with checksum_mode=when_required"
                found = self.told(error)
                _log.warning(
                    "the server refuses x-amz-checksum-%s; from here on %s (%s)", sent_checksum.lower(), instead, found
                )
            return True
        return False

    def _final_error(self, error: Exception, what: str, where: str) -> PublishError:
        if not isinstance(error, BotoCoreError | ClientError):
            fix = "correct the endpoint, the region and the AWS profile"
            return PermanentPublishError(what, file=where or None, found=self._scrub(str(error)), fix=fix)
        verdict = judge(error)
        kind = TransientPublishError if verdict.may_heal else PermanentPublishError
        return kind(what, file=where or None, found=self._scrub(verdict.found), fix=verdict.fix)

    def _cause(self, error: Exception) -> Exception | None:
        # A server may quote the key in its message; a traceback would then show it through the cause.
        return None if self._scrub(str(error)) != str(error) else error

    def told(self, error: ClientError) -> str:
        """What the server said, for a log: without the key, which it may quote."""
        return self._scrub(judge(error).found)

    def _scrub(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _open_session(settings: PublishSettings) -> Session:
    """A session with the credentials that the settings bring, else with those that AWS tools find."""
    session, region = get_session(), settings.region
    if settings.credentials is not None:
        given = settings.credentials()
        if not given.access_key_id or not given.secret_access_key:
            raise PermanentPublishError(
                "the credentials that are named for this destination hold no AWS keys",
                expected="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
                fix="put both keys into them, or leave them out to use those of this machine",
            )
        session.set_credentials(given.access_key_id, given.secret_access_key, given.session_token)
        region = region or given.region
    if region is not None:
        session.set_config_variable("region", region)
    return session


def _make_client(session: Session, settings: PublishSettings) -> S3Client:
    style: _Style = "virtual" if settings.path_style is False else "path"
    client = _client_in_style(session, settings, style)
    # Only a client knows which endpoint the environment and the AWS profile lead to.
    endpoint_url = client.meta.endpoint_url
    check_endpoint(endpoint_url)
    if settings.path_style is None and ".amazonaws.com" in endpoint_url:
        client.close()
        client = _client_in_style(session, settings, "auto")
    return client


def _client_in_style(session: Session, settings: PublishSettings, style: _Style) -> S3Client:
    config = Config(
        s3={
            "addressing_style": style,
            # A body's checksum is in a header of its own, which is signed: no need to hash the body once more.
            "payload_signing_enabled": False,
        },
        connect_timeout=settings.connect_timeout_seconds,
        read_timeout=settings.read_timeout_seconds,
        retries={"mode": "standard", "total_max_attempts": 1},
        max_pool_connections=settings.max_concurrency + 2,
        # Checksums are computed and sent by us, in a header: botocore would put them into a trailer over TLS, which
        # some servers take for part of the content's encoding.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return cast("S3Client", session.create_client("s3", endpoint_url=settings.endpoint_url, config=config))
