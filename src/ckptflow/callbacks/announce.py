"""Say that a checkpoint is saved, without a moment's delay for training."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ckptflow.callbacks.harmless import harmless
from ckptflow.callbacks.numbers import plain_numbers
from ckptflow.callbacks.ranks import rank as this_rank
from ckptflow.callbacks.sending import Announcement, Sender

_sender = Sender()


def checkpoint_saved(
    path: str | os.PathLike[str],
    *,
    global_step: int | None = None,
    metrics: Mapping[str, object] | None = None,
    rank: int | None = None,
) -> None:
    """Announce a checkpoint after the call that saves it. Returns at once and never raises.

    A thread of its own waits until the checkpoint is complete, all ranks' files included, and sends the event
    ``ckptflow.checkpoint.ready`` to the Prefect server that ``PREFECT_API_URL`` names. A server that is away is tried
    again as long as the process lives; what is lost then is found by the sweep.

    Args:
        path: the checkpoint or its step directory.
        global_step: optimizer steps done; None takes it from the checkpoint.
        metrics: plain finite numbers, such as ``{"loss": 2.1}``; anything else is left out, also tensors on a GPU and
            DTensors, which would have to be waited for.
        rank: of this process, where neither torch.distributed nor the environment tells it. Only rank 0 announces.
    """
    with harmless(f"the checkpoint {path!r} is not announced"):
        if (this_rank() if rank is None else rank) != 0:
            return
        step = None if global_step is None else int(global_step)
        _sender.add(Announcement(path=Path(os.path.abspath(path)), global_step=step, metrics=plain_numbers(metrics)))


def do_checkpoint(prefix: str, period: int = 1) -> Callable[..., None]:
    """A callback for the end of an epoch after MXNet's convention; goes behind MXNet's own, which saves the file.

    >>> callbacks = [do_checkpoint("runs/mnist/model", period=2)]  # announces model-0002.params, model-0004.params, …

    Args:
        prefix: path and begin of the name, as for ``mx.callback.do_checkpoint``.
        period: announce each ``period``-th epoch.
    """
    period = max(1, int(period))

    def announce(iter_no: int, sym: object = None, arg: object = None, aux: object = None) -> None:
        epoch = iter_no + 1
        if epoch % period == 0:
            checkpoint_saved(f"{prefix}-{epoch:04d}.params", global_step=epoch)

    return announce


def wait_until_announced(timeout_seconds: float) -> bool:
    """Wait until nothing is left to send; for the end of a script. Gives False where the time was too short."""
    return _sender.wait(timeout_seconds)
