"""What a file of a checkpoint holds, by its name alone: weights, optimizer states, both, or something else."""

from __future__ import annotations

import re
from typing import Literal

RECORD_NAME = "ckptflow.json"
"""What ckptflow made, and of what: written last into each model, and put last at each destination."""

Kind = Literal["weights", "optimizer", "weights and optimizer", "other"]
KINDS: tuple[Kind, ...] = ("weights", "optimizer", "weights and optimizer", "other")

# Lightning, Megatron and DCP put both into one file; of DCP's only the directory's name may tell.
_DCP = ".distcp"
_BOTH = r"\.(?:ckpt|distcp)$|^model_optim_rng\.pt$"
_OPTIMIZER = r"optim|^exp_avg(?:_sq)?\.pt$|\.states$"
_WEIGHTS = (
    r"\.(?:safetensors|params|gguf|pth)$|^model_world_size_\d+_rank_\d+\.pt$|model_states\.pt$|^fp32\.pt$"
    r"|^(?:pytorch_model|adapter_model|model|consolidated)[^/]*\.(?:bin|pt)$"
)
_KIND_OF_NAME = re.compile(f"(?P<both>{_BOTH})|(?P<optimizer>{_OPTIMIZER})|(?P<weights>{_WEIGHTS})")
_KINDS_BY_GROUP: dict[str | None, Kind] = {
    "both": "weights and optimizer",
    "optimizer": "optimizer",
    "weights": "weights",
}
_OPTIMIZER_DIRECTORY = re.compile(r"^optim(?:izer)?(?:_\d+)?$")
_WEIGHTS_DIRECTORY = re.compile(r"^pytorch_model_fsdp(?:_\d+)?$|^model(?:_weights)?$")


def kind_of_directory(name: str) -> Kind | None:
    """What DCP files in a directory of this name hold; None where the name doesn't tell."""
    if _OPTIMIZER_DIRECTORY.match(name):
        return "optimizer"
    return "weights" if _WEIGHTS_DIRECTORY.match(name) else None


def kind_of_file(name: str, directory: Kind | None = None) -> Kind:
    """What a file of this name holds; ``directory`` is that of ``kind_of_directory``."""
    match = _KIND_OF_NAME.search(name)
    if match is None:
        return "other"
    if directory is not None and name.endswith(_DCP):
        return directory
    return _KINDS_BY_GROUP[match.lastgroup]
