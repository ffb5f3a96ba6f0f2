"""From a config to published models: fresh weights, a training script of transformers, the pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import transformers

from checkpoints import TINY
from ckptflow.callbacks import HuggingFaceCallback
from ckptflow.demo.text import split_text, train_tokenizer
from ckptflow.seeding.request import SeedRequest
from ckptflow.seeding.seed import seed_model
from flowruns import FlowLab

CONTEXT = 64
SAVED = (2, 30)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """More threads than free cores wait for each other, at each tiny operation, ten times as long as they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.service
@pytest.mark.usefixtures("one_thread")
def test_a_fresh_model_is_trained_and_its_last_checkpoint_knows_more_than_its_first(
    lab: FlowLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", lab.server.api_url)
    text, held_back = split_text()
    tokenizer = train_tokenizer(text)
    config = transformers.LlamaConfig(
        **{k: v for k, v in TINY.items() if k not in ("model_type", "dtype", "vocab_size", "max_position_embeddings")},
        vocab_size=len(tokenizer),
        max_position_embeddings=CONTEXT,
    )
    config.save_pretrained(tmp_path / "config")
    tokenizer.save_pretrained(tmp_path / "config")
    fresh = tmp_path / "fresh"
    seed_model(SeedRequest(config=str(tmp_path / "config"), out=fresh, init_std="small-init", dtype="float32"))

    train(fresh, tmp_path / "runs" / "sft", rows_of(tokenizer, text)[:240])
    done = lab.run(tmp_path / "runs" / "sft", f"file://{tmp_path}/models", "--no-forward", "--dtype", "float32")
    assert [(outcome["global_step"], outcome["state"]) for outcome in done.outcomes] == [
        (step, "published") for step in SAVED
    ], done.stderr
    test_rows = rows_of(tokenizer, held_back)
    first, last = (loss_of(tmp_path / "models" / "sft" / f"step-{step}", test_rows) for step in SAVED)
    assert last < first - 0.5


def rows_of(tokenizer: transformers.PreTrainedTokenizerFast, text: str) -> list[Mapping[str, torch.Tensor]]:
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    rows = tokens[: len(tokens) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
    return [{"input_ids": row, "labels": row} for row in rows]


def train(model_dir: Path, run_dir: Path, rows: list[Mapping[str, torch.Tensor]]) -> None:
    """A fine-tuning script as for any pretrained model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    arguments = transformers.TrainingArguments(
        output_dir=str(run_dir),
        max_steps=SAVED[-1],
        learning_rate=2e-2,
        per_device_train_batch_size=8,
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, callbacks=[SaveAt(*SAVED), HuggingFaceCallback()]
    )
    trainer.processing_class = transformers.AutoTokenizer.from_pretrained(model_dir)
    trainer.train()


class SaveAt(transformers.TrainerCallback):
    """Checkpoints at these steps and no others."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_step_end(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **kwargs: object,
    ) -> transformers.TrainerControl:
        control.should_save = state.global_step in self.steps
        return control


def loss_of(model_dir: Path, rows: list[Mapping[str, torch.Tensor]]) -> float:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    batch = torch.stack([row["input_ids"] for row in rows[:32]])
    with torch.no_grad():
        return float(model(input_ids=batch, labels=batch).loss)
