"""What an error of huggingface_hub means: may it heal, and if not, what is the cure."""

from __future__ import annotations

import re
from importlib import import_module

from huggingface_hub import errors as hub_errors
from huggingface_hub.errors import HfHubHTTPError

from ckptflow.publish.verdicts import Verdict, parse_retry_after

#: Base of dropped connections and timeouts, of httpx with huggingface_hub 1.x, of httpx2 with 2.x.
TransportError: type[Exception] = import_module(HfHubHTTPError.__mro__[1].__module__.partition(".")[0]).TransportError

#: What a call of huggingface_hub raises. LFS parts fail with RuntimeError, bad answers and arguments with ValueError.
HUB_FAILURES = (HfHubHTTPError, TransportError, RuntimeError, ValueError, OSError)

_TOKEN_FIX = "set HF_TOKEN, or log in with `hf auth login`, with a token that may write"
RIGHTS_FIX = "give the token the right to write to this repository or organization, or choose another one"
_CURES = {
    400: None,
    401: _TOKEN_FIX,
    402: "free storage on the Hub, or ask its owner for more",
    403: RIGHTS_FIX,
    404: "check the name of the repository and the endpoint",
    413: "convert again with a smaller --max-shard-size",
}
_STATUS_MAY_HEAL = frozenset({408, 425, 429, 500, 502, 503, 504})
_QUOTA = re.compile(r"storage|quota|space", re.IGNORECASE)
#: What the storage behind the Hub, which is S3, says of a body that was damaged or cut on its way.
_DAMAGED = re.compile(r"BadDigest|ContentSHA256Mismatch|IncompleteBody|RequestTimeout")
_RATE_LIMIT = re.compile(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d+)")


def judge(error: Exception) -> Verdict:
    """Sort an error of a call into what may heal and what will not."""
    cause = error.__cause__
    if isinstance(error, RuntimeError) and isinstance(cause, Exception):
        return _judge_transfer(cause)
    if isinstance(error, HfHubHTTPError):
        return _judge_answer(error)
    if isinstance(error, hub_errors.OfflineModeIsEnabled):
        return Verdict(may_heal=False, found="offline mode", fix="unset HF_HUB_OFFLINE")
    if isinstance(error, hub_errors.LocalTokenNotFoundError):
        return Verdict(may_heal=False, found="no token", fix=_TOKEN_FIX)
    if "certificate_verify_failed" in str(error).lower():
        found = "the server's TLS certificate is not trusted"
        return Verdict(may_heal=False, found=found, fix="set SSL_CERT_FILE to the server's authority")
    if isinstance(error, TransportError):
        found = f"{type(error).__name__}: {error}".rstrip(": ")
        return Verdict(may_heal=True, found=found, fix="check the network and the endpoint")
    # The LFS batch says in a ValueError what it refuses; so does the client of a repository's name.
    fix = _CURES[402] if _QUOTA.search(str(error)) else None
    return Verdict(may_heal=False, found=str(error) or type(error).__name__, fix=fix)


def status_of(error: Exception) -> int:
    """HTTP status of an answer, 0 where there was none."""
    response = getattr(error, "response", None)
    return 0 if response is None else int(response.status_code)


def _judge_transfer(cause: Exception) -> Verdict:
    verdict = judge(cause)
    if status_of(cause) == 403 and not _QUOTA.search(verdict.found):
        # The signed URL of a part has run out; the next LFS batch gives new ones.
        return Verdict(may_heal=True, found=verdict.found, fix="run it again")
    if status_of(cause) == 400 and isinstance(cause, HfHubHTTPError) and _DAMAGED.search(cause.response.text):
        return Verdict(may_heal=True, found=verdict.found, fix="run it again")
    return verdict


def _judge_answer(error: HfHubHTTPError) -> Verdict:
    status = status_of(error)
    found = f"HTTP {status} {error.server_message or _first_line(error)}".rstrip()
    may_heal = status in _STATUS_MAY_HEAL
    fix = "run it again later" if may_heal else _CURES.get(status)
    if status in (402, 403) and _QUOTA.search(found):
        fix = _CURES[402]
    return Verdict(
        may_heal=may_heal, found=found, fix=fix, retry_after_seconds=_retry_after(error) if may_heal else None
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


def _retry_after(error: HfHubHTTPError) -> float | None:
    """``Retry-After``, or ``t`` of ``RateLimit: "api";r=0;t=55``."""
    headers = error.response.headers
    seconds = parse_retry_after(headers.get("retry-after", ""))
    limit = _RATE_LIMIT.search(headers.get("ratelimit", "")) if seconds is None else None
    return float(limit[1]) if limit else seconds
