"""Progress of one file among several that are sent at once."""

from __future__ import annotations

import threading

from ckptflow.publish.targets import Progress


class FileProgress:
    """Bytes of one file, told once each although parts may be sent again, by one thread at a time.

    All files of an upload share the lock.
    """

    def __init__(self, total_bytes: int, progress: Progress | None, lock: threading.Lock) -> None:
        self._left_bytes = total_bytes
        self._progress = progress
        self._lock = lock

    def add(self, done_bytes: int) -> None:
        """Tell of bytes, unless the whole file was told of already."""
        with self._lock:
            news = min(done_bytes, self._left_bytes)
            self._left_bytes -= news
            if news and self._progress is not None:
                self._progress(news)

    def finish(self) -> None:
        """Tell of what was not sent, because it was there."""
        self.add(self._left_bytes)
