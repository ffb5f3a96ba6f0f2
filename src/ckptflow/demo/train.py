"""The training job: a tiny Llama, two ranks, FSDP2 over gloo, AdamW on fp32 master weights.

A process of its own (``python -m ckptflow.demo.train``), as training is in life: it knows nothing of the
pipeline and only writes checkpoints. Rank 0 prints one JSON object a line: ``{"global_step", "loss"}`` per step and
``{"saved", "seconds"}`` when a checkpoint is complete.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ckptflow.demo.text import split_text, train_tokenizer
from ckptflow.demo.verl_layout import TrainingState, save_checkpoint

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

WORLD_SIZE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of the Llama; the default has 1.5 million parameters."""

    hidden_size: int = 128
    intermediate_size: int = 352
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    context: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """One run: it ends at the last of ``save_steps`` (global steps, ascending)."""

    run_dir: Path
    save_steps: tuple[int, ...]
    shape: ModelShape = field(default_factory=ModelShape)
    sequences_per_rank: int = 6
    learning_rate: float = 6e-3
    warmup_steps: int = 20
    seed: int = 7


def run_training(plan: TrainingPlan) -> None:
    """Trains on ``WORLD_SIZE`` processes of this machine and returns when all have ended.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; the message holds its traceback.
    """
    from torch.multiprocessing.spawn import spawn

    plan.run_dir.mkdir(parents=True, exist_ok=True)
    # The ranks meet at a file, not at a port: nothing on this machine can be in the way.
    with tempfile.TemporaryDirectory() as meeting_dir:
        spawn(_train_rank, args=(plan, f"file://{meeting_dir}/ranks"), nprocs=WORLD_SIZE)  # type: ignore[no-untyped-call]


def _train_rank(rank: int, plan: TrainingPlan, meeting_point: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // WORLD_SIZE))
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=WORLD_SIZE)
    try:
        _train(rank, plan)
    finally:
        dist.destroy_process_group()


def _train(rank: int, plan: TrainingPlan) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    text, _ = split_text()
    tokenizer = train_tokenizer(text)
    tokens = torch.tensor(tokenizer.encode(text), dtype=torch.long)

    torch.manual_seed(plan.seed)  # the same on all ranks: each shards its own copy of the initial model
    model = build_model(plan.shape, tokenizer)
    shard_model(model, init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("fsdp",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _learning_rate_factor(plan))
    state = TrainingState(
        model=model, optimizer=optimizer, schedule=schedule, tokenizer=tokenizer, rank=rank, world_size=WORLD_SIZE
    )
    torch.manual_seed(plan.seed + rank)  # from here on different: each rank draws its own sequences
    for global_step in range(1, plan.save_steps[-1] + 1):
        loss = _train_step(state, _draw_sequences(tokens, plan))
        if rank == 0:
            _say(global_step=global_step, loss=round(loss, 4))
        if global_step in plan.save_steps:
            begin = time.monotonic()
            seen = global_step * plan.sequences_per_rank * WORLD_SIZE
            save_checkpoint(plan.run_dir, global_step, state, sequences_seen=seen)
            if rank == 0:
                _say(saved=global_step, seconds=round(time.monotonic() - begin, 2))


def build_model(shape: ModelShape, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A Llama with random fp32 weights drawn from the default generator."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
        **ids,
    )
    model: PreTrainedModel = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)  # type: ignore[no-untyped-call]
    return model


def shard_model(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shards each decoder layer and then the rest, along the dimension that verl would take."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    def placement(parameter: torch.nn.Parameter) -> Shard:
        # verl's get_shard_placement_fn: the first dimension that divides evenly, else dimension 0.
        return next((Shard(dim) for dim, size in enumerate(parameter.shape) if size % WORLD_SIZE == 0), Shard(0))

    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh, shard_placement_fn=placement)
    fully_shard(model, mesh=mesh, shard_placement_fn=placement)


def _train_step(state: TrainingState, sequences: torch.Tensor) -> float:
    import torch

    loss = state.model(input_ids=sequences, labels=sequences).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
    state.optimizer.step()
    state.schedule.step()
    state.optimizer.zero_grad()
    return float(loss.detach())


def _draw_sequences(tokens: torch.Tensor, plan: TrainingPlan) -> torch.Tensor:
    """Random windows of the text: int64 [sequences_per_rank, context]."""
    import torch

    starts = torch.randint(len(tokens) - plan.shape.context, (plan.sequences_per_rank,))
    return torch.stack([tokens[start : start + plan.shape.context] for start in starts.tolist()])


def _learning_rate_factor(plan: TrainingPlan) -> Callable[[int], float]:
    """Linear warm-up, then a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < plan.warmup_steps:
            return (step + 1) / plan.warmup_steps
        done = (step - plan.warmup_steps) / max(1, plan.save_steps[-1] - plan.warmup_steps)
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, done))

    return factor


def _say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job that the arguments describe."""
    parser = argparse.ArgumentParser(prog="python -m ckptflow.demo.train", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--save-steps", type=int, nargs="+", required=True, metavar="N")
    args = parser.parse_args(argv)
    run_training(TrainingPlan(run_dir=args.run_dir, save_steps=tuple(sorted(args.save_steps))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
