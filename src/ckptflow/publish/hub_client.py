"""A client of the Hub that has time limits, retries what may heal, and never tells the token."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import HfApi, constants
from huggingface_hub.utils.tqdm import disable_progress_bars

from ckptflow.errors import PermanentPublishError, PublishError, TransientPublishError
from ckptflow.publish.hub_errors import HUB_FAILURES, judge
from ckptflow.publish.settings import PublishSettings, check_endpoint
from ckptflow.publish.verdicts import delay_seconds

_Limits = tuple[float | None, float | None, float | None, float | None]  # connect, read, write, wait for a connection

#: A commit may take the Hub a minute, in which no byte comes: its read timeout is this many times that of S3.
_SLOW_ANSWERS = 5
_NO_LIMITS: _Limits = (None, None, None, None)
_XET_HOSTS = ("huggingface.co", "hf.co")

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_limits: _Limits | None = None
_T = TypeVar("_T")


class HubCaller:
    """Runs calls of huggingface_hub against one endpoint."""

    def __init__(self, settings: PublishSettings) -> None:
        self._settings = settings
        # By hand: huggingface_hub reads HF_ENDPOINT once, when it is imported.
        self.endpoint = settings.endpoint_url or os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        self.endpoint = self.endpoint.rstrip("/")
        check_endpoint(self.endpoint)
        self._token = _token(settings)
        self.api = HfApi(endpoint=self.endpoint, token=self._token)
        self.uses_xet = _prepare_process(self.endpoint, settings)

    def check_token(self) -> None:
        """Refuse to go on without a token."""
        if not self._token:
            raise PermanentPublishError(
                "no token for the Hub",
                file=self.endpoint,
                fix="set HF_TOKEN, or log in with `hf auth login`, with a token that may write",
            )

    def run(
        self,
        action: Callable[[HfApi], _T],
        *,
        what: str,
        where: str,
        passing: tuple[type[Exception], ...] = (),
        max_attempts: int | None = None,
    ) -> _T:
        """Run one call, with retries.

        Args:
            action: does the call; may be called several times.
            what: what fails if it fails, for the message.
            where: the repository and file, for the message.
            passing: errors that are answers to the caller, raised as they are.
            max_attempts: fewer tries than the settings say, where huggingface_hub itself retries each request.

        Raises:
            TransientPublishError: it failed ``max_attempts`` times.
            PermanentPublishError: it will not heal.
        """
        attempt = 1
        while True:
            try:
                return action(self.api)
            except passing:
                raise
            except HUB_FAILURES as error:
                verdict = judge(error)
                if not verdict.may_heal or attempt >= min(max_attempts or 1000, self._settings.max_attempts):
                    raise self.final_error(error, what, where) from self._cause(error)
                self.wait(attempt, error, where)
                attempt += 1

    def wait(self, attempt: int, error: Exception, where: str) -> None:
        """Sleep before the next try, as long as the server asked for."""
        verdict = judge(error)
        seconds = delay_seconds(self._settings, attempt, verdict.retry_after_seconds)
        _log.info("%s: %s; tried again in %.1f s", where, self._scrub(verdict.found), seconds)
        time.sleep(seconds)

    def final_error(self, error: Exception, what: str, where: str) -> PublishError:
        """The error to raise in place of one of huggingface_hub."""
        verdict = judge(error)
        kind = TransientPublishError if verdict.may_heal else PermanentPublishError
        return kind(what, file=where, found=self._scrub(verdict.found), fix=verdict.fix)

    def _cause(self, error: Exception) -> Exception | None:
        # A server may quote the token in its message; a traceback would then show it through the cause.
        return None if self._scrub(str(error)) != str(error) else error

    def _scrub(self, text: str) -> str:
        return text.replace(self._token, "***") if self._token else text


def _token(settings: PublishSettings) -> str | None:
    """The token that the settings bring, else the one that Hugging Face tools find."""
    if settings.credentials is None:
        return huggingface_hub.get_token()
    token = settings.credentials().hub_token
    if not token:
        raise PermanentPublishError(
            "the credentials that are named for this destination hold no token for the Hub",
            expected="HF_TOKEN",
            fix="put the token into them, or leave them out to use the one of this machine",
        )
    return token


def _prepare_process(endpoint: str, settings: PublishSettings) -> bool:
    """Settings that huggingface_hub has once per process: time limits, no progress bars, xet; gives whether xet is on.

    Only the Hub itself has a xet server. Elsewhere the client would ask for one and fail, without falling back to
    LFS; it looks at this constant on each upload, and the environment variable behind it only when it is imported.
    Once off, xet stays off: a later upload to the Hub in this process goes by LFS, which works as well.
    """
    with _lock:
        if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
            disable_progress_bars()
        if (urlsplit(endpoint).hostname or "") not in _XET_HOSTS:
            constants.HF_HUB_DISABLE_XET = True
        _set_timeouts(settings)
    return not constants.HF_HUB_DISABLE_XET and find_spec("hf_xet") is not None


def _set_timeouts(settings: PublishSettings) -> None:
    """Give the shared HTTP client time limits, which it lacks: a hung commit would hang for ever.

    A client that has other limits, because somebody made its factory, is left alone.
    """
    global _limits
    session = huggingface_hub.get_session()
    found = session.timeout
    read = _SLOW_ANSWERS * settings.read_timeout_seconds
    wanted = (settings.connect_timeout_seconds, read, read, None)
    # A new factory closes the client that is in use, perhaps by another thread: not without need.
    if (found.connect, found.read, found.write, found.pool) in (_limits, _NO_LIMITS) and _limits != wanted:
        kind, hooks = type(session), session.event_hooks
        huggingface_hub.set_client_factory(lambda: kind(event_hooks=hooks, follow_redirects=True, timeout=wanted))
        _limits = wanted
