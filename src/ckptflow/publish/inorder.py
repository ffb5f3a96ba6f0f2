"""The order in which the files of a model are sent, and how many at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from typing import TypeVar

from ckptflow.processes.pools import windowed
from ckptflow.publish.model import LocalFile, publish_rank
from ckptflow.publish.settings import MIB

_T = TypeVar("_T")

#: Called by whoever sends a file, now and then; raises where it is not to be sent any further.
GoOn = Callable[[], None]

#: Files up to this size go several at once.
_SMALL_BYTES = 8 * MIB
_SMALL_AT_ONCE = 4


def send_in_order(
    files: Sequence[LocalFile], send: Callable[[LocalFile, GoOn], _T], *, first: str, large_at_once: int
) -> list[_T]:
    """All files by ranks; of one rank, small ones several at once, large ones as many as the target takes.

    A large file has parts that go at once, and begins when the one before it has begun to read; a small one is mostly
    waiting for answers. After a failure, files before the one that failed are finished, those after it are not: no part
    of them is read any more once it is known.

    Args:
        files: in the order of sending.
        send: sends one file; asks whether to go on before it reads anything.
        first: the first that is really sent. It goes alone if it is small: a store that refuses it would refuse the
            others as well.
        large_at_once: large files at once.

    Returns:
        What ``send`` gave, in the same order.
    """
    results: list[_T] = []
    halt = _Halt()
    pool = ThreadPoolExecutor(max(_SMALL_AT_ONCE, large_at_once), thread_name_prefix="ckptflow-file")
    begun = [threading.Event() for _ in files]

    def send_placed(item: tuple[int, LocalFile]) -> _T:
        place, file = item

        def go_on() -> None:
            begun[place].set()
            halt.check(place)

        with halt.after_failure_of(place):
            try:
                if place and file.bytes > _SMALL_BYTES:
                    begun[place - 1].wait()  # or a later one could be sent whole before an earlier one that fails
                return send(file, go_on)
            finally:
                begun[place].set()

    def group(item: tuple[int, LocalFile]) -> tuple[int, bool, bool]:
        file = item[1]
        is_small = file.bytes <= _SMALL_BYTES
        return publish_rank(file.name), is_small, is_small and file.name == first

    try:
        for (_, are_small, _), members in groupby(enumerate(files), group):
            batch = list(members)
            at_once = _SMALL_AT_ONCE if are_small else large_at_once
            # One by one they go in this thread, where an interrupt ends them at once.
            results += map(send_placed, batch) if at_once == 1 else windowed(pool, send_placed, batch, at_once)
    finally:
        halt.all()
        pool.shutdown(wait=False, cancel_futures=True)
    return results


class _HaltedError(Exception):
    """Another file failed; never seen outside, since that file comes before, and its error is raised first."""


class _Halt:
    """Ends the sending of files that come after one that failed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_place = sys.maxsize

    @contextmanager
    def after_failure_of(self, place: int) -> Iterator[None]:
        """While the file at this place is sent."""
        try:
            yield
        except Exception:
            with self._lock:
                self._last_place = min(self._last_place, place)
            raise

    def all(self) -> None:
        """End all of them."""
        with self._lock:
            self._last_place = -1

    def check(self, place: int) -> None:
        """Raise where the file at this place is not to be sent any further."""
        if place > self._last_place:
            raise _HaltedError
