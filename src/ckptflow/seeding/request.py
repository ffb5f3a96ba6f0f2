"""What a person asks of ``seed-model``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptflow.errors import UsageError
from ckptflow.request import GB
from ckptflow.seeding.recipes import DEFAULT
from ckptflow.transforms.cast import CASTABLE

DTYPES = tuple(name for name in CASTABLE if name != "float64")
SEEDS = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedRequest:
    """One model to make.

    Attributes:
        config: directory with config.json, a config file, or ``ORG/NAME[@REVISION]`` on the Hub.
        out: directory to make.
        dtype: of the weights; those that models read in fp32 stay fp32.
        init_std: ``default``, a formula's name, or a standard deviation.
        seed: the same seed gives the same bytes.
        max_shard_bytes: most bytes of tensors in one weight file.
        overwrite: replace the model, or the loose files, that ``out`` holds (``check_replaceable``).
        threads: None for as many as help.
        memory_budget_bytes: bound on buffers, in bytes.
    """

    config: str
    out: Path
    dtype: str = "bfloat16"
    init_std: str | float = DEFAULT
    seed: int = 0
    max_shard_bytes: int = 5 * GB
    overwrite: bool = False
    threads: int | None = None
    memory_budget_bytes: int = 512 * 10**6

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError("not a dtype for fresh weights", expected=", ".join(DTYPES), found=self.dtype)
        if not 0 <= self.seed < SEEDS:
            raise UsageError("not a seed", expected=f"0 to {SEEDS - 1}", found=self.seed)
