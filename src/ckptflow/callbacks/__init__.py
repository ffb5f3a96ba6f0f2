"""The trainer's side: say that a checkpoint is saved, and how fast training goes.

Nothing here can stop or slow a training run: the work is done in a thread of its own, in rank 0 only, and what goes
wrong is logged once.

==========================  ==============================================
plain loops                 ``checkpoint_saved(path, global_step=…)``
MXNet's ``Module.fit``      ``do_checkpoint(prefix, period)``
transformers' ``Trainer``   ``HuggingFaceCallback()``
Lightning's ``Trainer``     ``LightningCallback()``
==========================  ==============================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptflow.callbacks.announce import checkpoint_saved, do_checkpoint, wait_until_announced
from ckptflow.callbacks.reporting import (
    BatchEnd,
    ByteSpeedometer,
    LogValidationMetrics,
    ProgressBar,
    Speedometer,
    log_train_metric,
)

if TYPE_CHECKING:
    from ckptflow.callbacks.huggingface import HuggingFaceCallback
    from ckptflow.callbacks.lightning import LightningCallback

__all__ = [
    "BatchEnd",
    "ByteSpeedometer",
    "HuggingFaceCallback",
    "LightningCallback",
    "LogValidationMetrics",
    "ProgressBar",
    "Speedometer",
    "checkpoint_saved",
    "do_checkpoint",
    "log_train_metric",
    "wait_until_announced",
]


def __getattr__(name: str) -> object:
    # Their base classes belong to frameworks that take seconds to import.
    if name == "HuggingFaceCallback":
        from ckptflow.callbacks import huggingface

        return huggingface.HuggingFaceCallback
    if name == "LightningCallback":
        from ckptflow.callbacks import lightning

        return lightning.LightningCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
