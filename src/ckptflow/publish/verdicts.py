"""What an error of a store means, and how long to wait before the next try."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from ckptflow.publish.settings import PublishSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to think of an error.

    Attributes:
        may_heal: the same request may succeed later.
        found: the error in a few words; may hold what the server said.
        fix: the cure, where one is known.
        retry_after_seconds: what the server asked for, where it did.
    """

    may_heal: bool
    found: str
    fix: str | None
    retry_after_seconds: float | None = None


def delay_seconds(settings: PublishSettings, attempt: int, retry_after_seconds: float | None) -> float:
    """Wait after try number ``attempt``, from 1: doubling, with jitter, at least what the server asked for.

    A server that asks for more than ten times the longest wait of our own gets that.
    """
    limit = settings.backoff_limit_seconds
    delay: float = min(limit, settings.backoff_seconds * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)
    return max(delay, min(retry_after_seconds or 0.0, 10.0 * limit))


def parse_retry_after(text: str) -> float | None:
    """Seconds that a ``Retry-After`` asks for: a number, or a date, which proxies before a store send."""
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
