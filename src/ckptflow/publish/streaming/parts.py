"""Bytes that come in order, cut into the parts of an object; some parts are worked on at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from types import TracebackType
from typing import Generic, TypeVar

from ckptflow.errors import UsageError
from ckptflow.processes.pools import ended
from ckptflow.publish.parts import MAX_PARTS, MIB, MIN_PART_BYTES, PartPlan, plan_parts
from ckptflow.publish.settings import PublishSettings

_T = TypeVar("_T")

#: One part is filled while another is sent.
_LEAST_BUFFERS = 2


def fit_parts(total_bytes: int, settings: PublishSettings, budget_bytes: int) -> tuple[PartPlan, int]:
    """Part size and number of parts in flight for an object that is sent while it is produced.

    Args:
        total_bytes: size of the object.
        settings: wanted part size, and most parts in flight.
        budget_bytes: bound on all part buffers: those in flight and the one that is filled.

    Raises:
        UsageError: parts that are large enough for 10,000 of them to suffice don't fit the budget.
        PermanentPublishError: the file is larger than an object can be.
    """
    plan = plan_parts(total_bytes, settings.part_size_bytes)
    most_bytes = budget_bytes // _LEAST_BUFFERS // MIB * MIB
    if plan.part_bytes > most_bytes:
        least_bytes = plan_parts(total_bytes, MIN_PART_BYTES, max_parts=MAX_PARTS).part_bytes
        if least_bytes > most_bytes:
            raise UsageError(
                "the memory budget is too small to send this file while it is produced",
                expected=f"at least {_LEAST_BUFFERS} parts of {least_bytes} bytes",
                found=f"{budget_bytes} bytes for parts",
                fix="raise --memory-budget, or use a smaller --max-shard-size",
            )
        plan = replace(plan, part_bytes=most_bytes)
    in_flight = max(1, min(settings.max_concurrency, budget_bytes // plan.part_bytes - 1))
    return plan, in_flight


class PartStream(Generic[_T]):
    """Cuts what is appended into parts, and hands each whole part to ``work`` in a pool.

    ``append`` waits while as many parts as allowed are in flight. Use as a context manager: what is still queued after
    an error is dropped, and what runs is waited for, unless the error is an interrupt.

    Args:
        plan: the parts.
        pool: runs ``work``.
        in_flight: parts in the pool at once; one more is being filled.
        work: called with number (from 1) and content of each part; the content is not touched afterwards.
        before: called with the first part, in the thread that appends, before any is worked on.
    """

    def __init__(
        self,
        plan: PartPlan,
        pool: Executor,
        in_flight: int,
        work: Callable[[int, bytes], _T],
        before: Callable[[bytes], None] | None = None,
    ) -> None:
        self._plan = plan
        self._pool = pool
        self._in_flight = in_flight
        self._work = work
        self._before = before
        self._number = 1
        self._filled_bytes = 0
        self._content = bytearray(plan.part(1)[1])
        self._pending: deque[Future[_T]] = deque()
        self._ended = ended(self._pending)
        self._done: list[_T] = []

    def __enter__(self) -> PartStream[_T]:
        self._ended.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.__exit__(kind, error, trace)

    def append(self, data: memoryview | bytes) -> None:
        """Copy the next bytes.

        Raises:
            ValueError: more bytes than the plan has.
        """
        rest = memoryview(data)
        while rest:
            taken = rest[: len(self._content) - self._filled_bytes]
            if not taken:
                raise ValueError(f"more than {self._plan.total_bytes} bytes")
            self._content[self._filled_bytes : self._filled_bytes + len(taken)] = taken
            self._filled_bytes += len(taken)
            rest = rest[len(taken) :]
            if self._filled_bytes == len(self._content) and self._number < self._plan.count:
                self._hand_over()
                self._number += 1
                self._filled_bytes = 0
                self._content = bytearray(self._plan.part(self._number)[1])

    def finish(self) -> list[_T]:
        """The results of all parts, in order; call it once, after the last byte.

        Raises:
            ValueError: bytes are missing.
        """
        if self._number < self._plan.count or self._filled_bytes < len(self._content):
            raise ValueError(f"fewer than {self._plan.total_bytes} bytes")
        self._hand_over()
        while self._pending:
            self._done.append(self._pending.popleft().result())
        return self._done

    def _hand_over(self) -> None:
        while len(self._pending) >= self._in_flight:
            self._done.append(self._pending.popleft().result())
        # A bytearray is as good as bytes to all that reads it, and spares a copy of the part.
        content: bytes = self._content  # type: ignore[assignment]
        if self._number == 1 and self._before is not None:
            self._before(content)
        self._pending.append(self._pool.submit(self._work, self._number, content))
