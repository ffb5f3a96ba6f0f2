"""A callback for transformers' ``Trainer``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptflow.callbacks.announce import checkpoint_saved
from ckptflow.callbacks.harmless import BatchEndCallback, Reports, harmless
from ckptflow.callbacks.reporting import BatchEnd

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

    class HuggingFaceCallback(TrainerCallback):
        """Announces each ``checkpoint-N`` after the Trainer has written it, with the metrics of that step."""

        def __init__(
            self,
            batch_end_callback: BatchEndCallback | Iterable[BatchEndCallback] | None = None,
            eval_end_callback: BatchEndCallback | Iterable[BatchEndCallback] | None = None,
        ) -> None: ...


@cache
def _callback() -> type[TrainerCallback]:
    from transformers import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

    class HuggingFaceCallback(TrainerCallback):
        """Announces each ``checkpoint-N`` after the Trainer has written it, with the metrics of that step.

        The Trainer calls ``on_save`` when rank 0 has written its last file, ``trainer_state.json``; the files of
        other ranks are waited for before anything is sent.

        Args:
            batch_end_callback: called after each optimizer step, with the metrics that the Trainer logged last.
            eval_end_callback: called after each evaluation, with its metrics.
        """

        def __init__(
            self,
            batch_end_callback: BatchEndCallback | Iterable[BatchEndCallback] | None = None,
            eval_end_callback: BatchEndCallback | Iterable[BatchEndCallback] | None = None,
        ) -> None:
            self._batch_end = Reports(batch_end_callback)
            self._eval_end = Reports(eval_end_callback)
            self._epoch = self._steps_before = 0
            self._logged: dict[str, object] = {}

        def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
            if not state.is_world_process_zero:
                return
            with harmless("a checkpoint is not announced"):
                entries = [entry for entry in state.log_history if entry.get("step") == state.global_step]
                metrics = {name: value for entry in entries for name, value in entry.items() if name != "step"}
                path = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
                checkpoint_saved(path, global_step=state.global_step, metrics=metrics, rank=0)

        def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
            self._epoch, self._steps_before = int((state.epoch or 0.0) + 1e-6), state.global_step

        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, object] | None = None, **kwargs: Any
        ) -> None:
            if logs and "loss" in logs:
                self._logged = {name: value for name, value in logs.items() if name != "epoch"}

        def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
            if self._batch_end:
                self._batch_end(self._moment(state, self._logged))

        def on_evaluate(
            self, args: Any, state: Any, control: Any, metrics: dict[str, object] | None = None, **kwargs: Any
        ) -> None:
            self._eval_end(self._moment(state, metrics))

        def _moment(self, state: TrainerState, metrics: dict[str, object] | None) -> BatchEnd:
            return BatchEnd(epoch=self._epoch, nbatch=state.global_step - self._steps_before, eval_metric=metrics)

    HuggingFaceCallback.__qualname__ = "HuggingFaceCallback"  # pickle looks there, and finds it through __getattr__
    HuggingFaceCallback.__module__ = __name__
    return HuggingFaceCallback


def __getattr__(name: str) -> object:
    if name == "HuggingFaceCallback":
        return _callback()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
