"""Step directories as the Hugging Face Trainer leaves them, as old as a test wants."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

OLD = 10_000.0


def hf_step(directory: Path, *, age_seconds: float = OLD, shards: int = 2, missing: int = 0) -> Path:
    """A Trainer-like step directory with an index; the last ``missing`` shards are not there."""
    directory.mkdir(parents=True)
    names = [f"model-{n:05d}-of-{shards:05d}.safetensors" for n in range(1, shards + 1)]
    for n, name in enumerate(names[: shards - missing]):
        save_file({f"layers.{n}.weight": np.ones((4, 4), np.float32)}, directory / name)
    index = {
        "metadata": {"total_size": 64 * shards},
        "weight_map": {f"layers.{n}.weight": names[n] for n in range(shards)},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text("{}")
    (directory / "trainer_state.json").write_text("{}")
    make_old(directory, age_seconds)
    return directory


def make_old(directory: Path, age_seconds: float) -> None:
    """As if all of it had been written then."""
    at = time.time() - age_seconds
    for path in (*directory.rglob("*"), directory):
        os.utime(path, (at, at))
