"""Parts of files that are read in order and sent several at once, in a bounded amount of memory.

Two files may share the slots: while the last parts of one are on their way, the first parts of the next are read, so
that the connections are never idle between files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from ckptflow.processes.pools import ended

_T = TypeVar("_T")


class PartSlots:
    """A bound on the number of parts in memory, and on their bytes. One part alone may be larger than the budget.

    ``turn`` is held while the parts of one file are handed out: files follow each other. Memory is used again: fresh
    pages would cost several times the CPU time of reading a part into them.
    """

    def __init__(self, at_once: int, budget_bytes: int) -> None:
        self.turn = threading.Lock()
        self._is_free = threading.Condition()
        self._free = at_once
        self._budget_bytes = budget_bytes
        self._taken_bytes = 0
        self._spare: list[bytearray] = []

    def take(self, nbytes: int) -> bytearray:
        """Memory for a part; waits until there is room."""
        with self._is_free:
            self._is_free.wait_for(lambda: self._has_room(nbytes))
            self._free -= 1
            self._taken_bytes += nbytes
            fitting = next((place for place, each in enumerate(self._spare) if len(each) == nbytes), None)
            if fitting is not None:
                return self._spare.pop(fitting)
            # Spare memory of other sizes counts as well.
            while self._spare and self._taken_bytes + sum(map(len, self._spare)) > self._budget_bytes:
                self._spare.pop()
            if len(self._spare) > self._free:
                self._spare.pop()
        return bytearray(nbytes)

    def give_back(self, memory: bytearray) -> None:
        """Nobody reads the part any more."""
        with self._is_free:
            self._free += 1
            self._taken_bytes -= len(memory)
            self._spare.append(memory)
            self._is_free.notify_all()

    def _has_room(self, nbytes: int) -> bool:
        return self._free > 0 and (not self._taken_bytes or self._taken_bytes + nbytes <= self._budget_bytes)


def work_in_slots(
    pool: Executor,
    slots: PartSlots,
    lengths: Sequence[int],
    read: Callable[[int, bytearray], None],
    work: Callable[[int, bytearray], _T],
) -> list[_T]:
    """Read the parts of one file in order, each as soon as there is a slot, and work on them in a pool.

    Args:
        pool: runs ``work``.
        slots: shared by all files that are on their way.
        lengths: of the parts, in bytes.
        read: brings a part, by its place in ``lengths``, into memory of its length; called in order, by this thread.
        work: what is done with a part; when it is over, the memory is used for another one.

    Returns:
        What ``work`` gave, in order. After a failure no further part is read; the first in order is raised.
    """
    pending: list[Future[_T]] = []
    failed = threading.Event()

    def end(memory: bytearray, future: Future[_T]) -> None:
        slots.give_back(memory)
        if not future.cancelled() and future.exception() is not None:
            failed.set()

    with ended(pending):
        with slots.turn:
            for place, length in enumerate(lengths):
                with ExitStack() as on_failure:
                    memory = slots.take(length)
                    on_failure.callback(slots.give_back, memory)
                    if failed.is_set():
                        break
                    read(place, memory)
                    pending.append(pool.submit(work, place, memory))
                    on_failure.pop_all()
                pending[-1].add_done_callback(partial(end, memory))
        return [future.result() for future in pending]
