"""A callback for Lightning's ``Trainer``; both packages, ``lightning`` and ``pytorch_lightning``, are served."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptflow.callbacks.announce import checkpoint_saved
from ckptflow.callbacks.harmless import BatchEndCallback, Reports, harmless
from ckptflow.callbacks.reporting import BatchEnd

if TYPE_CHECKING:

    class LightningCallback:
        """Announces what the ``ModelCheckpoint`` callbacks of a trainer save."""

        def __init__(
            self,
            batch_end_callback: BatchEndCallback | Iterable[BatchEndCallback] | None = None,
            eval_end_callback: BatchEndCallback | Iterable[BatchEndCallback] | None = None,
        ) -> None: ...


PACKAGES = ("lightning.pytorch", "pytorch_lightning")
NOT_WRITTEN = -1


def _bases() -> tuple[type[Any], ...]:
    """Lightning's ``Callback``. Each package has its own, and whoever has both may use either."""
    loaded = tuple(sys.modules[name].Callback for name in PACKAGES if hasattr(sys.modules.get(name), "Callback"))
    if loaded:
        return loaded
    try:
        return (import_module(PACKAGES[0]).Callback,)
    except ModuleNotFoundError:
        return (import_module(PACKAGES[1]).Callback,)


@cache
def _callback(bases: tuple[type[Any], ...]) -> type[Any]:
    class LightningCallback(*bases):  # type: ignore[misc]
        """Announces what the ``ModelCheckpoint`` callbacks of a trainer save.

        They save after the hooks of all others, so the next hook looks which paths are new. What a script saves
        itself with ``trainer.save_checkpoint`` is announced with ``checkpoint_saved``.

        Args:
            batch_end_callback: called after each batch, with the numbers that ``training_step`` gives.
            eval_end_callback: called after each validation, with the metrics that are known then.
        """

        def __init__(
            self,
            batch_end_callback: BatchEndCallback | Iterable[BatchEndCallback] | None = None,
            eval_end_callback: BatchEndCallback | Iterable[BatchEndCallback] | None = None,
        ) -> None:
            self._batch_end = Reports(batch_end_callback)
            self._eval_end = Reports(eval_end_callback)
            self._known: dict[str, int] = {}
            self._saves: object = None

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            # A run that is resumed knows the paths of the run before, which has announced them.
            with harmless("checkpoints of the run before are announced again"):
                self._known |= {path: _changed_at(path) for path in _saved_paths(trainer)}
                self._saves = _saves(trainer)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self._announce(trainer)

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self._announce(trainer)

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            self._announce(trainer)

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self._announce(trainer)

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *args: Any
        ) -> None:
            if self._batch_end:
                metrics = outputs if isinstance(outputs, Mapping) else {} if outputs is None else {"loss": outputs}
                self._batch_end(BatchEnd(epoch=trainer.current_epoch, nbatch=batch_idx + 1, eval_metric=metrics))

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if self._eval_end and not trainer.sanity_checking:
                metrics = dict(trainer.callback_metrics)
                self._eval_end(BatchEnd(epoch=trainer.current_epoch, nbatch=trainer.global_step, eval_metric=metrics))

        def _announce(self, trainer: Any) -> None:
            with harmless("a checkpoint is not announced"):
                saves = _saves(trainer)
                if saves == self._saves:
                    return
                self._saves = saves
                # In all ranks: metrics of an epoch that is not over are put together from all of them.
                metrics = dict(trainer.callback_metrics)
                if not trainer.is_global_zero:
                    return
                for path in _saved_paths(trainer):
                    changed_at, known = _changed_at(path), self._known.get(path)
                    self._known[path] = changed_at
                    if changed_at != known != NOT_WRITTEN:
                        checkpoint_saved(path, global_step=trainer.global_step, metrics=metrics, rank=0)

    LightningCallback.__qualname__ = "LightningCallback"  # pickle looks there, and finds it through __getattr__
    LightningCallback.__module__ = __name__
    return LightningCallback


def _saves(trainer: Any) -> object:
    """Something that is another after each save; the same in all ranks, and without a look at the disk."""
    return [
        (
            getattr(each, "_last_global_step_saved", None),
            getattr(each, "_last_checkpoint_saved", None),
            getattr(each, "best_model_path", None),
            getattr(each, "last_model_path", None),
            len(getattr(each, "best_k_models", ())),
        )
        for each in trainer.checkpoint_callbacks
    ]


def _saved_paths(trainer: Any) -> list[str]:
    """Paths that the trainer's ``ModelCheckpoint`` callbacks tell; links to others of them are left out."""
    paths: dict[str, None] = {}
    for each in trainer.checkpoint_callbacks:
        best, last = getattr(each, "best_model_path", ""), getattr(each, "last_model_path", "")
        for path in (*getattr(each, "best_k_models", ()), best, last):
            if path and not os.path.islink(path):
                paths[str(path)] = None
    return list(paths)


def _changed_at(path: str) -> int:
    """Modification time in ns; ``NOT_WRITTEN`` where another thread is still about to."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return NOT_WRITTEN


def __getattr__(name: str) -> object:
    if name == "LightningCallback":
        return _callback(_bases())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
