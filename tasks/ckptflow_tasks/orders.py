"""What all workers of one merge are told, and how they hear that it is over.

A permit is a file in the work directory: who writes a weight file looks a few times a second whether it is still there.
That reaches threads, processes and other machines alike, and outlives nobody: whoever clears the work directory takes
the permits of runs that died with it, so that a worker left over from such a run stops too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from ckptflow import __version__
from ckptflow.conversion import Conversion
from ckptflow.errors import CkptflowError, OutputError
from ckptflow_tasks.planning import state_of_sources

LOOK_SECONDS = 0.5


class WorkerError(CkptflowError):
    """A worker is not set up as the process of the flow is; nothing is wrong with the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Handed to each worker together with the number of a weight file.

    Attributes:
        permit: the work may go on while this file is there.
        sources: ``state_of_sources`` of the plan.
        version: of ckptflow in the flow's process; another one may write other bytes.
    """

    permit: Path
    sources: str
    version: str = __version__

    def is_valid(self) -> bool:
        """Whether the work is still wanted."""
        try:
            # Opening asks the server of a network file system; the answer to stat may be up to a minute old.
            self.permit.open("rb").close()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def withdraw(self) -> None:
        """Stop all who work on this."""
        self.permit.unlink(missing_ok=True)

    def check_version(self) -> None:
        """Refuse to work beside another version.

        Raises:
            WorkerError: this process runs another version.
        """
        if self.version != __version__:
            raise WorkerError(
                "this worker has another version of ckptflow than the process of the flow",
                expected=self.version,
                found=__version__,
                fix="install the same version everywhere and start the workers again",
            )


@contextmanager
def ordered(conversion: Conversion) -> Iterator[Order]:
    """An order that is valid inside the block. Enter it under ``claim``, which clears the permits of dead runs.

    Raises:
        OutputError: the work directory can't be written.
    """
    permit = conversion.workspace.base / f"{uuid4().hex}.permit"
    order = Order(permit=permit, sources=state_of_sources(conversion))
    try:
        permit.touch(exist_ok=False)
    except OSError as error:
        raise OutputError("can't write here", file=permit.parent, found=str(error)) from error
    try:
        yield order
    finally:
        order.withdraw()


class Stop:
    """Looked at by the engine many times a second: Prefect can't stop code in a worker thread.

    Args:
        order: stop when it is no longer valid.
        timeout_seconds: stop after so long.
    """

    def __init__(self, order: Order, timeout_seconds: float) -> None:
        self._order = order
        self._is_withdrawn = False
        self._looked_at = time.monotonic()
        self._deadline = self._looked_at + timeout_seconds

    @property
    def is_late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._deadline

    def is_set(self) -> bool:
        """Whether to stop."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._is_withdrawn = not self._order.is_valid()
        return self._is_withdrawn or self.is_late
