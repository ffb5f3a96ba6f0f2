"""What a person asks of a conversion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckptflow.errors import UsageError

GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRequest:
    """One conversion: which checkpoint, what to make of it, and where.

    Attributes:
        path: checkpoint, step directory or run directory.
        out: directory to make.
        dtype: ``bfloat16``, ``float16``, ``float32`` or ``source`` (keep each tensor's dtype).
        keep_dtype: FQN globs that keep their source dtype.
        max_shard_bytes: most bytes of tensor data in one weight file.
        config_dir: directory with config.json and tokenizer files, where the trainer left none.
        base_model: directory of the base model of an adapter.
        adapter: fold LoRA into the base weights, or write it as a PEFT directory.
        lora_alpha: LoRA's alpha where the checkpoint does not tell it.
        allow_nonfinite: write NaN and Inf instead of refusing them.
        overwrite: replace the model, or the loose files, that ``out`` holds (``check_replaceable``).
        threads: worker threads; None for one per core.
        memory_budget_bytes: bound on the engine's buffers, in bytes.
        device: where to cast; ``auto`` takes the CPU unless a GPU is there and helps.
    """

    path: Path
    out: Path
    dtype: Literal["bfloat16", "float16", "float32", "source"] = "bfloat16"
    keep_dtype: tuple[str, ...] = ()
    max_shard_bytes: int = 5 * GB
    config_dir: Path | None = None
    base_model: Path | None = None
    adapter: Literal["merge", "export"] | None = None
    lora_alpha: float | None = None
    allow_nonfinite: bool = False
    overwrite: bool = False
    threads: int | None = None
    memory_budget_bytes: int = 512 * 10**6
    device: Literal["auto", "cpu", "cuda"] = "auto"


def check_named(config_dir: Path | None, base_model: Path | None) -> None:
    """Refuse directories that a person named and that are none, whether or not the checkpoint needs them.

    Raises:
        UsageError: there is no config.json, or there are no weights of a base model.
    """
    if config_dir is not None and not (config_dir / "config.json").is_file():
        raise _names_no_model("--config", config_dir, "a directory with config.json")
    if base_model is not None and not [*base_model.glob("*.safetensors"), *base_model.glob("*.bin")]:
        raise _names_no_model("--base-model", base_model, "a directory with model.safetensors, and config.json")


def _names_no_model(option: str, directory: Path, expected: str) -> UsageError:
    return UsageError(
        f"{option} names no directory of a model",
        file=directory,
        expected=expected,
        found="one without" if directory.is_dir() else "no directory",
        fix="check the path",
    )
