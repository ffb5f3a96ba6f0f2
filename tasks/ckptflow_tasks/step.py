"""The decorator of all tasks: what is retried, how long it may take, and that nothing is cached.

Prefect's caches don't look at files; whether work is done is seen in the work directory and at the destination.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.tasks import Task, exponential_backoff

from ckptflow.errors import CkptflowError, TransientPublishError
from ckptflow_tasks.limits import LIMITS

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

#: Tasks that compute on tensors; a limit on this tag is the number of GPUs.
GPU = "gpu"
# A server that restarts refuses connections at once: without these waits all tries would be over in seconds.
SLOT_TRIES, SLOT_WAIT_SECONDS, SLOT_WAIT_LIMIT_SECONDS = 10, 2.0, 60.0
# A network file system that hiccups, a server that is away. A full disk or a missing file won't heal by itself.
HEALING_ERRNOS = frozenset(
    (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ECONNRESET, errno.ECONNREFUSED, errno.EHOSTUNREACH)
)


def step(
    name: str,
    *,
    run_name: str | Callable[[], str],
    timeout_seconds: float | None,
    tags: tuple[str, ...] = (),
    retries: int = LIMITS.retries,
) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Make a task of a function.

    Args:
        name: of the task.
        run_name: of its runs: a template over the parameters, or what gives the name inside a run.
        timeout_seconds: stops it where it is called in the flow's own thread. Prefect can't stop other threads: a
            task that is mapped has to look at the clock itself, and passes None.
        tags: those that may have a limit. For each task with a tag Prefect asks the server for slots, and a server on
            SQLite often answers that it is busy, which costs two seconds.
        retries: 0 for a task of tasks, which are tried again themselves.
    """
    return task(
        name=name,
        task_run_name=run_name,
        tags=set(tags),
        retries=retries,
        retry_delay_seconds=exponential_backoff(backoff_factor=LIMITS.retry_delay_seconds),
        retry_jitter_factor=0.5,
        retry_condition_fn=can_heal,
        timeout_seconds=timeout_seconds,
        cache_policy=NO_CACHE,
        persist_result=False,
    )


def with_slot(tagged: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a task that has a tag, again where the server was too busy, or away, to say whether a slot is free.

    A server on SQLite answers a request for a slot with 503 while it writes anything else. Prefect's client asks six
    times in two minutes, and would then fail a run with which nothing is wrong; one that is being restarted it asks
    once.

    Raises:
        ConcurrencySlotAcquisitionError: it did not answer ``SLOT_TRIES`` times.
        Exception: of the task.
    """
    for number in range(SLOT_TRIES - 1):
        try:
            return tagged(*args, **kwargs)
        except ConcurrencySlotAcquisitionError as error:
            delay = min(SLOT_WAIT_SECONDS * 2**number, SLOT_WAIT_LIMIT_SECONDS)
            logger.warning("%s: asking again in %.0f s", error, delay)
            time.sleep(delay)
    return tagged(*args, **kwargs)


def heals(error: BaseException) -> bool:
    """Whether the same call may succeed a little later; a refused checkpoint never does."""
    if isinstance(error, TransientPublishError):
        return True
    if isinstance(error, CkptflowError):
        return isinstance(error.__cause__, OSError) and error.__cause__.errno in HEALING_ERRNOS
    return isinstance(error, OSError) and error.errno in HEALING_ERRNOS


def can_heal(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Prefect's ``retry_condition_fn``; the state of a failed try carries its exception."""
    return isinstance(state.data, BaseException) and heals(state.data)
