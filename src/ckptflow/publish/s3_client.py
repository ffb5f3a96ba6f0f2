"""A client of S3 that retries what may heal, and never tells a secret.

It is botocore's own: what boto3 adds to it is not used, and takes time to import.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import Session, get_session

from ckptflow.errors import PermanentPublishError, PublishError, TransientPublishError
from ckptflow.publish.s3_errors import error_code, is_checksum_refusal, is_condition_refusal, judge
from ckptflow.publish.settings import PublishSettings, check_endpoint
from ckptflow.publish.verdicts import delay_seconds

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_WITH_CONDITION = frozenset({"PutObject", "CompleteMultipartUpload"})
_WITH_CHECKSUM = frozenset(
    {"PutObject", "UploadPart", "CreateMultipartUpload", "CompleteMultipartUpload", "HeadObject"}
)

_Style = Literal["path", "virtual", "auto"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class S3Caller:
    """Runs requests against one endpoint.

    ``sends_checksums`` and ``is_conditional`` start as asked for; each is switched off for good, once, when the server
    says that it does not know the headers. Actions read them anew on each try. ``gives_checksums`` is switched off when
    the server takes checksums and does not give them back.
    """

    def __init__(self, settings: PublishSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._secrets: tuple[str, ...] = ()
        self.is_conditional = True
        mode = settings.checksum_mode or os.environ.get("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
        self.gives_checksums = True
        self.sends_checksums = mode.lower() == "when_supported"
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
    def needs_md5(self) -> bool:
        """Whether files are proven by their ETags, for want of checksums."""
        return not (self.sends_checksums and self.gives_checksums)

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
            conditional, checksums = self.is_conditional, self.sends_checksums
            try:
                return action(self.client)
            except ClientError as error:
                if error_code(error) in passing:
                    raise
                if self._step_back(error, was_conditional=conditional, sent_checksums=checksums):
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

    def _step_back(self, error: ClientError, *, was_conditional: bool, sent_checksums: bool) -> bool:
        """Switch off a header that the server does not know; True when the request is worth another try."""
        # Some servers say NotImplemented and not of what: the checksums go first, then the condition.
        is_nameless = not sent_checksums and error_code(error) == "NotImplemented"
        is_refusal = is_condition_refusal(error) or is_nameless
        if was_conditional and error.operation_name in _WITH_CONDITION and is_refusal:
            with self._lock:
                is_news, self.is_conditional = self.is_conditional, False
            if is_news:
                _log.warning(
                    "the server does not know If-None-Match; two uploads at once are only told apart by a look (%s)",
                    self._scrub(judge(error).found),
                )
            return True
        if sent_checksums and error.operation_name in _WITH_CHECKSUM and is_checksum_refusal(error):
            with self._lock:
                is_news, self.sends_checksums = self.sends_checksums, False
            if is_news:
                _log.warning(
                    "the server refuses x-amz-checksum headers; from here on as with checksum_mode=when_required (%s)",
                    self._scrub(judge(error).found),
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
            # A body's SHA-256 (or MD5) is in a header of its own, which is signed: no need to hash it once more.
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
