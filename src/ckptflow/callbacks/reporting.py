"""Speed and metrics in the log, in the style of MXNet's callbacks; in rank 0 only.

Each is called at the end of a batch with something that has ``epoch``, ``nbatch`` and ``eval_metric``: MXNet's own
``BatchEndParam``, or ``BatchEnd`` in a plain loop. https://mxnet.apache.org (``mxnet/callback.py``)
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TextIO

from ckptflow.callbacks.numbers import number_of
from ckptflow.callbacks.ranks import is_rank_zero
from ckptflow.cli.console import format_bytes

logger = logging.getLogger(__name__)


class BatchEndParam(Protocol):
    """What the callbacks look at."""

    @property
    def epoch(self) -> int:
        """From 0."""

    @property
    def nbatch(self) -> int:
        """Batches done in this epoch, from 0 or 1."""

    @property
    def eval_metric(self) -> object:
        """Name → value, an MXNet metric, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEnd:
    """The end of a batch in a plain training loop."""

    epoch: int
    nbatch: int
    eval_metric: object = None


def name_values(metric: object) -> list[tuple[str, float]]:
    """Names and values of a mapping or of an MXNet metric; what is no number is left out."""
    get_pairs = getattr(metric, "get_name_value", None)
    pairs = metric.items() if isinstance(metric, Mapping) else () if get_pairs is None else get_pairs()
    return [(str(name), number) for name, value in pairs if (number := number_of(value)) is not None]


def _text(metric: object, prefix: str = "") -> str:
    return "\t".join(f"{prefix}{name}={value:f}" for name, value in name_values(metric))


def _reset(metric: object) -> None:
    reset = getattr(metric, "reset", None)
    if reset is not None:
        reset()


class Speedometer:
    """Logs samples per second and metrics, each ``frequent`` batches.

    Args:
        batch_size: samples in a batch, of all ranks.
        frequent: batches between two lines.
        auto_reset: start the metric anew after each line, where it can be.
        unit: what ``batch_size`` counts, such as ``tokens``.
    """

    def __init__(self, batch_size: int, frequent: int = 50, auto_reset: bool = True, unit: str = "samples") -> None:
        self.batch_size = batch_size
        self.frequent = max(1, frequent)
        self.auto_reset = auto_reset
        self.unit = unit
        self._since: tuple[int, int, float] | None = None

    def __call__(self, param: BatchEndParam) -> None:
        """Take note of a batch."""
        now = time.perf_counter()
        if self._since is None or self._since[0] != param.epoch or param.nbatch < self._since[1]:
            self._since = (param.epoch, param.nbatch, now)
            return
        done = param.nbatch - self._since[1]
        if done == 0 or param.nbatch % self.frequent:
            return
        seconds = now - self._since[2]
        speed = done * self.batch_size / seconds if seconds > 0 else math.inf
        self._since = (param.epoch, param.nbatch, now)
        if is_rank_zero():
            text = _text(param.eval_metric)
            line = f"Epoch[{param.epoch}] Batch [{param.nbatch}]\tSpeed: {speed:.2f} {self.unit}/sec"
            logger.info("%s", f"{line}\t{text}" if text else line)
        if self.auto_reset:
            _reset(param.eval_metric)


class ByteSpeedometer:
    """A progress callback for the pipeline's steps: logs bytes done, GB/s and time left.

    Args:
        name: of the step.
        total_bytes: of all of it.
        every_seconds: time between two lines.
    """

    def __init__(self, name: str, total_bytes: int, every_seconds: float = 10.0) -> None:
        self.name = name
        self.total_bytes = total_bytes
        self.every_seconds = every_seconds
        self.done_bytes = 0
        self._begin = self._told = time.perf_counter()

    def __call__(self, nbytes: int) -> None:
        """Take note of bytes that were done since the last call."""
        self.done_bytes += nbytes
        now = time.perf_counter()
        is_done = self.done_bytes >= self.total_bytes
        if not is_rank_zero() or (now - self._told < self.every_seconds and not is_done):
            return
        self._told = now
        rate = self.done_bytes / max(now - self._begin, 1e-9)
        left = max(0, self.total_bytes - self.done_bytes) / rate if rate else math.inf
        done = f"{format_bytes(self.done_bytes)} of {format_bytes(self.total_bytes)}"
        logger.info("%s: %s, %.2f GB/s, %.0f s left", self.name, done, rate / 1e9, left)


class ProgressBar:
    """A bar on stderr where that is a terminal; elsewhere a line in the log for each tenth.

    Args:
        total: batches of an epoch.
        length: of the bar, in characters.
        stream: where to draw.
    """

    def __init__(self, total: int, length: int = 80, stream: TextIO | None = None) -> None:
        self.total = max(1, total)
        self.length = length
        self._stream = sys.stderr if stream is None else stream
        self._tenth = -1

    def __call__(self, param: BatchEndParam) -> None:
        """Take note of a batch."""
        if not is_rank_zero():
            return
        share = min(1.0, param.nbatch / self.total)
        filled = round(self.length * share)
        bar = f"[{'=' * filled}{'-' * (self.length - filled)}] {math.ceil(100 * share)}%"
        if self._stream.isatty():
            self._stream.write(f"\r{bar}")
            self._stream.flush()
        elif int(10 * share) != self._tenth:
            self._tenth = int(10 * share)
            logger.info("%s", bar)


def log_train_metric(period: int, auto_reset: bool = False) -> Callable[[BatchEndParam], None]:
    """A callback that logs the training metric each ``period`` batches, and starts it anew if asked."""
    period = max(1, period)

    def log(param: BatchEndParam) -> None:
        if param.nbatch % period or param.eval_metric is None:
            return
        if is_rank_zero():
            logger.info("Iter[%d] Batch[%d] %s", param.epoch, param.nbatch, _text(param.eval_metric, "Train-"))
        if auto_reset:
            _reset(param.eval_metric)

    return log


class LogValidationMetrics:
    """Logs the metrics of an evaluation at the end of an epoch."""

    def __call__(self, param: BatchEndParam) -> None:
        """Log them."""
        if is_rank_zero() and name_values(param.eval_metric):
            logger.info("Epoch[%d] %s", param.epoch, _text(param.eval_metric, "Validation-"))
