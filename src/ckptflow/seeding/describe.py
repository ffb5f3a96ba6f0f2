"""The tensors of a model that has not been trained, and what each is filled with, from its config."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptflow.errors import UnsupportedCheckpointError
from ckptflow.processes.askprocess import ask
from ckptflow.seeding.fills import FreshTensor

TIMEOUT_SECONDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshModel:
    """A model that has not been trained.

    Attributes:
        architecture: the transformers class.
        std: the standard deviation that was asked for; None where the model's own rule was.
        tensors: in the model's order, tied ones once.
        ties: alias → owner.
        notes: what a person should know.
    """

    architecture: str
    std: float | None
    tensors: tuple[FreshTensor, ...]
    ties: Mapping[str, str]
    notes: tuple[str, ...]


def fresh_model(config_dir: Path, init_std: str | float, seed: int) -> FreshModel:
    """Ask transformers, in a process of its own: its import takes seconds, and a config may describe anything.

    Args:
        config_dir: directory with config.json; no code in it is run.
        init_std: ``default``, the name of a formula, or a number.
        seed: for values that a model computes out of random numbers.

    Raises:
        UnsupportedCheckpointError: transformers does not know the model, or fills it by rules that can't be followed.
    """
    answer = _ask(config_dir, {"init_std": init_std, "seed": seed})
    if "refused" in answer:
        raise UnsupportedCheckpointError(
            "no fresh model can be made of this config", file=config_dir, found=answer["refused"]
        )
    return FreshModel(
        architecture=answer["architecture"],
        std=answer["std"],
        tensors=tuple(FreshTensor.from_json(tensor) for tensor in answer["tensors"]),
        ties=answer["ties"],
        notes=tuple(answer["notes"]),
    )


def _ask(config_dir: Path, question: Mapping[str, Any]) -> dict[str, Any]:
    return ask(
        "ckptflow.seeding.describe", config_dir, json.dumps(question), TIMEOUT_SECONDS, UnsupportedCheckpointError
    )


if __name__ == "__main__":
    from ckptflow.seeding.describing import main

    sys.exit(main(sys.argv[1:]))
