"""Training goes on whatever happens here: what fails is logged, once, and raised to nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from ckptflow.callbacks.reporting import BatchEnd

logger = logging.getLogger(__name__)

BatchEndCallback = Callable[[BatchEnd], object]


@contextmanager
def harmless(complaint: str) -> Iterator[None]:
    """What the block raises becomes a warning that begins with the complaint."""
    try:
        yield
    except Exception:  # the caller is a training loop
        logger.warning("%s", complaint, exc_info=True)


class Reports:
    """Callbacks that are called at the end of a batch or an evaluation; one that fails is not called again.

    Args:
        callbacks: none, one or several, as for ``batch_end_callback`` of MXNet's ``Module.fit``.
    """

    def __init__(self, callbacks: BatchEndCallback | Iterable[BatchEndCallback] | None) -> None:
        self._callbacks = [callbacks] if callable(callbacks) else list(callbacks or ())

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def __call__(self, param: BatchEnd) -> None:
        """Call each."""
        for callback in list(self._callbacks):
            try:
                callback(param)
            except Exception:  # the caller is a training loop
                logger.warning("%r fails and is not called again", callback, exc_info=True)
                self._callbacks.remove(callback)
