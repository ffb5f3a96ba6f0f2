"""Work in a pool of threads that keeps an order and a bound, and that outlives nobody."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager
from typing import TypeVar

_S = TypeVar("_S")
_T = TypeVar("_T")


def windowed(pool: Executor, work: Callable[[_S], _T], items: Iterable[_S], window: int) -> Iterator[_T]:
    """``map`` over a pool, in order, that takes at most ``window`` items before their results are taken.

    After a failure no work goes on.
    """
    pending: deque[Future[_T]] = deque()
    with ended(pending):
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) >= window:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


@contextmanager
def ended(pending: Collection[Future[_T]]) -> Iterator[None]:
    """No work of a pool outlives the block: what is queued is dropped, what runs is waited for.

    After an interrupt (a time limit, Ctrl-C) it is not waited for.
    """
    is_interrupt = True
    try:
        yield
        is_interrupt = False
    except Exception:
        is_interrupt = False
        raise
    finally:
        for future in pending:
            future.cancel()
        if not is_interrupt:
            wait(pending)
