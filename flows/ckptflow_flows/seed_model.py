"""seed-model: the start of training from scratch, a model directory with fresh weights out of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from prefect import flow, get_run_logger, runtime
from prefect.states import Completed
from pydantic import Field, field_validator

from ckptflow.cli.console import format_bytes
from ckptflow.errors import CheckpointError, UsageError, ValueRefusedError
from ckptflow.request import GB
from ckptflow.seeding.recipes import parse_init_std
from ckptflow.seeding.request import SEEDS, SeedRequest
from ckptflow_flows.post_training import refused
from ckptflow_flows.settings import Section
from ckptflow_tasks.seeding import make_seed


class SeedModel(Section):
    """One model with fresh weights."""

    config: str = Field(
        title="Config", description="Directory with config.json and tokenizer, or ORG/NAME[@REVISION] on the Hub."
    )
    out: Path = Field(title="Directory", description="Where the model is made.")
    dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", title="Dtype")
    init_std: str = Field(
        "default",
        title="Standard deviation",
        description="`default` (the model's own rule), `small-init`, `mt-nlg-530b`, or a number.",
    )
    seed: int = Field(0, ge=0, lt=SEEDS, title="Seed", description="The same seed gives the same bytes.")
    max_shard_bytes: int = Field(
        5 * GB, gt=0, title="Largest weight file", description="Most bytes of tensors in one weight file."
    )
    overwrite: bool = Field(False, title="Replace", description="Take the place of a model or loose files there.")
    threads: int | None = Field(None, gt=0, title="Threads", description="Default: cores.")

    @field_validator("init_std")
    @classmethod
    def _is_known(cls, text: str) -> str:
        try:
            parse_init_std(text)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return text

    def request(self) -> SeedRequest:
        """What the library is asked."""
        return SeedRequest(
            config=self.config,
            out=self.out,
            dtype=self.dtype,
            init_std=parse_init_std(self.init_std),
            seed=self.seed,
            max_shard_bytes=self.max_shard_bytes,
            overwrite=self.overwrite,
            threads=self.threads,
        )


def _flow_run_name() -> str:
    # Prefect gives the validated model here in some cases and the plain parameters in others.
    model = runtime.flow_run.parameters["model"]
    return f"seed-model {Path(model['out'] if isinstance(model, dict) else model.out).name}"


@flow(name="seed-model", flow_run_name=_flow_run_name, persist_result=False, validate_parameters=True)
def seed_model(model: SeedModel) -> Any:
    """Make a model directory with fresh weights; one that is there already is checked and left alone.

    Args:
        model: from which config, where, and how its weights are drawn.
    """
    try:
        made = make_seed(model.request(), model.out.name)
    except (CheckpointError, ValueRefusedError, UsageError) as error:
        get_run_logger().error("refused: %s", error)
        return refused(error)
    return Completed(message=f"{made['tensors']} tensors, {format_bytes(made['bytes'])} at {made['out']}", data=made)
