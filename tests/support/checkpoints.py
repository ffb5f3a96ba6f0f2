"""Builds FSDP checkpoints as verl leaves them: rank files of DTensors, config and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from rank_writer import mesh_of, save_ranks, sharded
from validation import CONFIG, llama_shapes

WORLD_SIZE = 2
WORDS = ("<unk>", "<s>", "</s>", "it", "is", "a", "truth", "universally", "acknowledged", "that", "man", "must", "want")
TINY: dict[str, Any] = {
    **CONFIG,
    "dtype": "float32",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Change = Callable[[dict[str, Any]], Any]


def write_fsdp_step(
    run_dir: Path,
    global_step: int = 10,
    *,
    config: Mapping[str, Any] = TINY,
    changes: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] | None = None,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """A whole step directory of two ranks with random fp32 weights.

    Args:
        run_dir: the training run; ``global_step_N`` is made in it.
        global_step: N, also the seed of the weights.
        config: of a Llama.
        changes: FQN → what is stored in place of the tensor.
        extra: more tensors to store.
    """
    weights = llama_values(config, global_step) | dict(extra or {})
    for fqn, change in (changes or {}).items():
        weights[fqn] = change(weights[fqn])
    step_dir = run_dir / f"global_step_{global_step}"

    def state(rank: int) -> dict[str, DTensor]:
        mesh = mesh_of([WORLD_SIZE], ["fsdp"])
        return {fqn: sharded(full, mesh, [Shard(0)]) for fqn, full in weights.items()}

    actor = save_ranks(step_dir / "actor", WORLD_SIZE, state)
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": WORLD_SIZE}))
    write_model_directory(actor / "huggingface", config)
    (run_dir / "latest_checkpointed_iteration.txt").write_text(str(global_step))
    return step_dir


def llama_values(config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """FQN → fp32 weights, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {fqn: torch.randn(shape, generator=generator) * 0.1 for fqn, shape in llama_shapes(config).items()}


def write_model_directory(directory: Path, config: Mapping[str, Any]) -> None:
    """config.json and a word-level tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
