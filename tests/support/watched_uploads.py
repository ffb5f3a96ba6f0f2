"""Uploads in processes of their own that get killed, and a reader who looks at the destination all the while."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from ckptflow.publish import MARKER_NAME
from publishing import Store, contents_of

CHILD = """
import sys
from pathlib import Path
from ckptflow.publish import PublishSettings, upload
def progress(done_bytes):
    print(done_bytes, flush=True)
upload(Path(sys.argv[1]), sys.argv[2], overwrite=sys.argv[3] == "overwrite", progress=progress,
       settings=PublishSettings(part_size_bytes=8 << 20, max_concurrency=2))
"""


def start_child(model: Path, uri: str, overwrite: str = "") -> subprocess.Popen[str]:
    """An upload that prints how many bytes it did."""
    command = [sys.executable, "-c", CHILD, str(model), uri, overwrite]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill_after(child: subprocess.Popen[str], limit_bytes: int) -> None:
    """Kill -9 as soon as the child says that it did so many bytes; it may be done before."""
    assert child.stdout is not None
    with child.stdout:
        done_bytes = 0
        for line in child.stdout:
            done_bytes += int(line)
            if done_bytes >= limit_bytes:
                break
        child.kill()
    child.wait()


class Reader(threading.Thread):
    """Polls a destination; notes each look that saw the marker without all files in full size."""

    def __init__(self, store: Store, model: Path) -> None:
        super().__init__()
        self._store = store
        self._sizes = {name: len(content) for name, content in contents_of(model).items()}
        self._is_over = threading.Event()
        self.looks = 0
        self.faults: list[dict[str, int]] = []

    def run(self) -> None:
        while not self._is_over.is_set():
            try:
                seen = self._store.sizes()
            except FileNotFoundError:
                continue  # a temporary file went between listing and looking
            self.looks += 1
            if MARKER_NAME in seen and seen != self._sizes:
                self.faults.append(seen)
            time.sleep(0.01)

    def __enter__(self) -> Reader:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()
