"""Writes checkpoints in the layout and the order in which verl's FSDP checkpoint manager writes them.

    RUN/global_step_N/actor/model_world_size_W_rank_R.pt         this rank's shards, as DTensors
    RUN/global_step_N/actor/optim_world_size_W_rank_R.pt
    RUN/global_step_N/actor/extra_state_world_size_W_rank_R.pt   learning-rate schedule and random states
    RUN/global_step_N/actor/huggingface/                         config, generation config, tokenizer
    RUN/global_step_N/actor/fsdp_config.json
    RUN/global_step_N/data.pt                                    where the data loader was
    RUN/latest_checkpointed_iteration.txt                        N, written last

Source: ``verl/utils/checkpoint/fsdp_checkpoint_manager.py`` and ``verl/trainer/ppo/ray_trainer.py`` (volcengine/verl).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """What one rank holds of the job, all of it sharded or repeated as FSDP2 left it."""

    model: PreTrainedModel
    optimizer: Optimizer
    schedule: LRScheduler
    tokenizer: PreTrainedTokenizerFast
    rank: int
    world_size: int


def save_checkpoint(run_dir: Path, global_step: int, state: TrainingState, *, sequences_seen: int) -> Path:
    """Writes this rank's part of one checkpoint; every rank must call it. Returns the step directory.

    Rank 0 also writes the model directory and, after a barrier, the tracker file: only then have all ranks written.
    """
    import torch
    import torch.distributed as dist

    step_dir = run_dir / f"global_step_{global_step}"
    actor = step_dir / "actor"
    actor.mkdir(parents=True, exist_ok=True)
    dist.barrier()

    suffix = f"world_size_{state.world_size}_rank_{state.rank}.pt"
    torch.save(state.model.state_dict(), actor / f"model_{suffix}")
    torch.save(state.optimizer.state_dict(), actor / f"optim_{suffix}")
    extra = {"lr_scheduler": state.schedule.state_dict(), "rng": _random_states()}
    torch.save(extra, actor / f"extra_state_{suffix}")
    if state.rank == 0:
        _write_model_directory(actor, state)
    dist.barrier()

    if state.rank == 0:
        torch.save({"_sampler_iter_state": {"samples_yielded": sequences_seen}}, step_dir / "data.pt")
        (run_dir / TRACKER).write_text(str(global_step))
    return step_dir


def _write_model_directory(actor: Path, state: TrainingState) -> None:
    huggingface = actor / "huggingface"
    state.model.config.save_pretrained(huggingface)
    if state.model.generation_config is not None:
        state.model.generation_config.save_pretrained(huggingface)
    state.tokenizer.save_pretrained(huggingface)
    config = {"FSDP_version": 2, "world_size": state.world_size}
    (actor / "fsdp_config.json").write_text(json.dumps(config, indent=4))


def _random_states() -> dict[str, object]:
    import numpy as np
    import torch

    return {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
