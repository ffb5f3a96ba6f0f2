"""The thread that sends announcements: bounded, never in the way, and patient with a server that is away."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

if TYPE_CHECKING:
    from ckptflow.discovery.discover import FoundCheckpoint

logger = logging.getLogger(__name__)

MOST_WAITING = 100
# How long other ranks, or a network file system, may need after rank 0 is done.
COMPLETE_SECONDS = 600.0
LOOK_SECONDS = 1.0
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 1.0, 60.0
# At the end of the process; a server that refuses the connection costs milliseconds.
EXIT_SECONDS, LEAVING_LOOK_SECONDS = 5.0, 0.1


@dataclass(slots=True, kw_only=True)
class Announcement:
    """One checkpoint that was saved.

    Attributes:
        path: absolute.
        global_step: as the trainer counts.
        metrics: plain numbers.
        since: when it was announced, on the monotonic clock.
        failures: tries to send it.
        key: its events' ids come from it, so that one which a slow server took without an answer is not doubled.
    """

    path: Path
    global_step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)
    failures: int = 0
    key: UUID = field(default_factory=uuid4)


class Sender:
    """Takes announcements from the training thread and sends them in its own."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # data loaders are no trainers

    def add(self, announcement: Announcement) -> None:
        """Take it and return; the oldest goes where there are too many."""
        with self._changed:
            if len(self._waiting) == MOST_WAITING:
                self._warn_once("full", "too many checkpoints wait to be announced; the oldest are left to the sweep")
            self._waiting.append(announcement)
            self._start()
            self._changed.notify_all()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until all are sent or given up."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_seconds)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Announcement] = deque(maxlen=MOST_WAITING)
        self._busy = False
        self._leaving = False
        self._warned: set[str] = set()
        self._thread: threading.Thread | None = None

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="ckptflow-announce", daemon=True)
            self._thread.start()
            atexit.unregister(self._at_exit)
            atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        with self._changed:
            self._leaving = True
            self._changed.notify_all()
        if not self.wait(EXIT_SECONDS):
            logger.warning("the last checkpoints could not be announced; the sweep finds them")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                announcement = self._waiting.popleft()
                self._busy = True
            pause = self._try(announcement)
            if pause is not None:
                self._put_back(announcement, pause)

    def _put_back(self, announcement: Announcement, pause_seconds: float) -> None:
        """Keep it for another try, unless the process ends and the server is away."""
        with self._changed:
            self._busy = False
            if self._leaving and announcement.failures:
                self._waiting.clear()
                return
            if len(self._waiting) == MOST_WAITING:
                return
            if announcement.failures:
                self._waiting.appendleft(announcement)
            else:
                self._waiting.append(announcement)  # others may be complete before it
            if not self._leaving:
                self._changed.wait_for(lambda: self._leaving, pause_seconds)
                return
        time.sleep(min(pause_seconds, LEAVING_LOOK_SECONDS))

    def _try(self, announcement: Announcement) -> float | None:
        """Send it if it is time; gives the seconds to wait before the next try, None where there is none."""
        try:
            return self._send(announcement)
        except OSError as error:
            announcement.failures += 1
            self._warn_once("away", f"the Prefect server can't be reached ({error}); training goes on, trying again")
            return min(RETRY_SECONDS * 2.0 ** min(announcement.failures - 1, 16), LONGEST_RETRY_SECONDS)
        except Exception:  # a thread that dies in silence would lose all that follows
            logger.warning("the checkpoint %s is not announced", announcement.path, exc_info=True)
            return None

    def _send(self, announcement: Announcement) -> float | None:
        from ckptflow.callbacks.events import PrefectApi, ready_event

        api = PrefectApi.from_environment()
        if api is None:
            self._warn_once("unset", "PREFECT_API_URL is not set: checkpoints are not announced")
            return None
        found, reason = self._look(announcement)
        if not found:
            if time.monotonic() - announcement.since < COMPLETE_SECONDS:
                return LOOK_SECONDS
            logger.warning("the checkpoint %s is not announced: %s", announcement.path, reason)
            return None
        step, metrics, key = announcement.global_step, announcement.metrics, announcement.key
        api.send([ready_event(each, step, metrics, key=key) for each in found])
        self._warned.discard("away")
        return None

    def _look(self, announcement: Announcement) -> tuple[list[FoundCheckpoint], str]:
        """The checkpoints at the path if all of them are complete, else why not."""
        from ckptflow.discovery.discover import judge
        from ckptflow.formats.registry import find_below

        now = time.time()
        judged = [found for each in find_below(announcement.path) if (found := judge(each, 0.0, now)) is not None]
        if not judged:
            return [], "no checkpoint of a known layout is there"
        for found in judged:
            if found.state != "complete":
                return [], f"{found.state}: {found.reason}"
        return judged, ""

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", message)
