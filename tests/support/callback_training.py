"""Real training loops on the CPU that announce their checkpoints as docs/callbacks.md shows.

Started as ``python callback_training.py LOOP RUN_DIR MODEL_DIR``, where LOOP is ``fsdp``, ``transformers`` or
``lightning`` and MODEL_DIR holds config and tokenizer. Each does four steps and saves at steps 2 and 4; what it prints
as JSON says whether all was announced.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from transformers import (
    AutoConfig,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from ckptflow.callbacks import (
    HuggingFaceCallback,
    LightningCallback,
    checkpoint_saved,
    wait_until_announced,
)
from ckptflow.demo.verl_layout import TrainingState, save_checkpoint

WORLD_SIZE, STEPS, SAVE_EVERY = 2, 4, 2
PATIENCE_SECONDS = 200.0


def train_fsdp(run_dir: Path, model_dir: Path) -> None:
    """Plain torch, FSDP2 on two ranks over gloo, files as verl writes them; the whole weights go beside the run."""
    with tempfile.TemporaryDirectory() as meeting:
        where = (run_dir, model_dir, f"file://{meeting}/ranks")
        # Forked, since two more processes that import everything take longer than all the rest.
        start_processes(train_rank, args=where, nprocs=WORLD_SIZE, start_method="fork")


def train_rank(rank: int, run_dir: Path, model_dir: Path, meeting_point: str) -> None:
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=WORLD_SIZE)
    torch.manual_seed(0)
    model = fresh_model(model_dir)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = TrainingState(
        model=model,
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
        tokenizer=AutoTokenizer.from_pretrained(model_dir),
        rank=rank,
        world_size=WORLD_SIZE,
    )
    tokens = torch.arange(16).reshape(2, 8)
    for global_step in range(1, STEPS + 1):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert isinstance(norm, DTensor)  # only all ranks together can read it
        optimizer.step()
        optimizer.zero_grad()
        if global_step % SAVE_EVERY == 0:
            step_dir = save_checkpoint(run_dir, global_step, state, sequences_seen=2 * global_step)
            checkpoint_saved(step_dir, global_step=global_step, metrics={"loss": loss, "norm": norm})
            keep_whole_weights(model, rank, whole_weights(run_dir, global_step))
    report(rank=rank)
    dist.barrier()
    dist.destroy_process_group()


def fresh_model(model_dir: Path) -> PreTrainedModel:
    return LlamaForCausalLM(AutoConfig.from_pretrained(model_dir)).float()


def whole_weights(run_dir: Path, global_step: int) -> Path:
    """Where the weights of a step are as torch puts them together, to compare with what is published."""
    return run_dir.with_name(f"{run_dir.name}-whole-{global_step}.st")


def keep_whole_weights(model: PreTrainedModel, rank: int, path: Path) -> None:
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if rank == 0:
        save_file(whole, path)


def report(rank: int = 0) -> None:
    sent = wait_until_announced(PATIENCE_SECONDS)
    sys.stdout.write(json.dumps({"rank": rank, "sent": sent}) + "\n")


def train_transformers(run_dir: Path, model_dir: Path) -> None:
    """The Trainer of transformers."""
    run_trainer(run_dir, model_dir, HuggingFaceCallback())
    report()


def run_trainer(
    run_dir: Path, model_dir: Path, callback: HuggingFaceCallback, *, steps: int = STEPS, save_every: int = SAVE_EVERY
) -> None:
    row = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
    arguments = TrainingArguments(
        output_dir=str(run_dir),
        max_steps=steps,
        save_steps=save_every,
        eval_strategy="steps",
        eval_steps=save_every,
        logging_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(model_dir)
    trainer = Trainer(
        model=fresh_model(model_dir),
        args=arguments,
        train_dataset=[row] * 2 * STEPS,
        eval_dataset=[row] * 2,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=[callback],
    )
    trainer.train()


def train_lightning(run_dir: Path, model_dir: Path) -> None:
    """The Trainer of Lightning; config and tokenizer are put beside its files, for whoever loads them."""
    shutil.copytree(model_dir, run_dir)
    run_lightning(run_dir, model_dir, LightningCallback())
    report()


def run_lightning(
    run_dir: Path,
    model_dir: Path,
    callback: LightningCallback,
    *,
    steps: int = STEPS,
    package: str = "lightning.pytorch",
    resume_from: Path | None = None,
    **saving: object,
) -> None:
    """Train to a global step; ``saving`` are more options of ``ModelCheckpoint``."""
    lightning = import_module(package)

    class Tuning(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = fresh_model(model_dir)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = self.model(input_ids=batch, labels=batch).loss
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("val_loss", self.model(input_ids=batch, labels=batch).loss)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    saver = import_module(f"{package}.callbacks").ModelCheckpoint(
        dirpath=run_dir, filename="{step}", every_n_train_steps=SAVE_EVERY, save_top_k=-1, **saving
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        val_check_interval=SAVE_EVERY,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, saver],
    )
    rows = torch.utils.data.DataLoader(torch.arange(8).repeat(2 * STEPS, 1), batch_size=2)
    trainer.fit(Tuning(), rows, torch.utils.data.DataLoader(torch.arange(8).repeat(2, 1)), ckpt_path=resume_from)


LOOPS: dict[str, Callable[[Path, Path], None]] = {
    "fsdp": train_fsdp,
    "transformers": train_transformers,
    "lightning": train_lightning,
}

if __name__ == "__main__":
    torch.set_num_threads(1)  # all loops run at once
    LOOPS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
