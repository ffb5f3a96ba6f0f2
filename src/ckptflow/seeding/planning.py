"""A fresh model, planned: every tensor, file and byte offset, before a value is drawn."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckptflow.dtypes import dtype_named
from ckptflow.engine.options import EngineOptions
from ckptflow.errors import UnsupportedCheckpointError
from ckptflow.fingerprint import fingerprint_plan
from ckptflow.output.sidefiles import QUANTIZATION_KEY, config_bytes, read_config, side_files, with_dtype
from ckptflow.output.workspace import Workspace
from ckptflow.plan import ConsolidationPlan, PlannedTensor, arrange_files
from ckptflow.seeding.describe import FreshModel, fresh_model
from ckptflow.seeding.fills import FreshTensor
from ckptflow.seeding.request import SeedRequest
from ckptflow.seeding.sources import config_directory
from ckptflow.tensors import TensorSource
from ckptflow.transforms.cast import cast


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeding:
    """A fresh model that is planned down to the byte offsets and has not been begun.

    Attributes:
        request: what was asked.
        model: its tensors, and what each is filled with.
        plan: what will be written, arranged into files.
        side: name → content of config, tokenizer and other side files.
        notes: what a person should know.
        fingerprint: identity of all of it; the same fingerprint gives the same output bytes.
    """

    request: SeedRequest
    model: FreshModel
    plan: ConsolidationPlan
    side: Mapping[str, bytes]
    notes: tuple[str, ...]
    fingerprint: str

    @property
    def workspace(self) -> Workspace:
        """Where it works."""
        return Workspace(out=Path(os.path.realpath(self.request.out)), fingerprint=self.fingerprint)

    @property
    def inputs(self) -> list[Path]:
        """The config, where it is not the Hub's."""
        path = Path(self.request.config)
        return [path] if path.exists() else []

    @property
    def overwrite(self) -> bool:
        """Whether it may replace something else."""
        return self.request.overwrite

    @property
    def recipe(self) -> dict[str, Any]:
        """The options that change the output's bytes."""
        names = ("dtype", "init_std", "seed", "max_shard_bytes")
        return {name: getattr(self.request, name) for name in names} | {"std": self.model.std}

    @property
    def engine_options(self) -> EngineOptions:
        """How the engine runs; none of it changes the output's bytes."""
        return EngineOptions(threads=self.request.threads, memory_budget_bytes=self.request.memory_budget_bytes)


def plan_seeding(request: SeedRequest) -> Seeding:
    """Find out what the model is made of; takes seconds, since transformers is asked.

    Raises:
        UsageError: there is no such config.
        UnsupportedCheckpointError: no fresh model can be made of it.
    """
    with config_directory(request.config) as directory:
        model = fresh_model(directory, request.init_std, request.seed)
        side, notes = _side_content(directory, request, model)
    tensors = tuple(_planned(tensor) for tensor in model.tensors)
    plan = ConsolidationPlan(tensors=tensors, ties=dict(model.ties))
    plan = arrange_files(cast(plan, request.dtype), request.max_shard_bytes)
    identity = {
        "recipe": {k: v for k, v in asdict(request).items() if k in ("dtype", "seed", "max_shard_bytes")},
        "tensors": [tensor.to_json() for tensor in model.tensors],
        "plan": fingerprint_plan(plan, directory),
        "side": {name: hashlib.sha256(data).hexdigest() for name, data in side.items()},
    }
    return Seeding(
        request=request,
        model=model,
        plan=plan,
        side=side,
        notes=(*model.notes, *notes),
        fingerprint=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
    )


def _planned(tensor: FreshTensor) -> PlannedTensor:
    source = TensorSource(tensor.shape, dtype_named(tensor.dtype), ())
    if source.numel == 0:
        raise UnsupportedCheckpointError("config.json describes a tensor without elements", tensor=tensor.fqn)
    return PlannedTensor(fqn=tensor.fqn, source=source, dtype=source.dtype, source_fqns=())


def _side_content(directory: Path, request: SeedRequest, model: FreshModel) -> tuple[dict[str, bytes], list[str]]:
    # A directory that a person named may hold links, as the Hub's cache does.
    side = dict(side_files(directory, Path("/")))
    config, notes = read_config(directory), []
    if QUANTIZATION_KEY in config:
        notes.append(f"{QUANTIZATION_KEY} was left out of config.json: fresh weights are not quantized")
    kept = {name: value for name, value in config.items() if name != QUANTIZATION_KEY}
    if not kept.get("architectures"):
        kept["architectures"] = [model.architecture]
    side["config.json"] = config_bytes(with_dtype(kept, request.dtype))
    if not any(name.startswith(("tokenizer", "vocab", "spiece", "tekken")) for name in side):
        notes.append("there is no tokenizer beside the config; training needs one")
    return side, notes
