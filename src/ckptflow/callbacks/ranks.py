"""Which process of a training job this is."""

from __future__ import annotations

import os
import sys

# Of torchrun and accelerate, of Open MPI, and of MXNet's parameter server.
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "DMLC_WORKER_ID")


def rank() -> int:
    """The global rank; 0 where there is only one process."""
    distributed = sys.modules.get("torch.distributed")  # a job that uses it has loaded it
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    for name in RANK_VARIABLES:
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return 0


def is_rank_zero() -> bool:
    """Whether this is the process that speaks for all."""
    return rank() == 0
