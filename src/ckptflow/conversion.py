"""A conversion, planned: which checkpoint was found, what is in it, and every byte that will be written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptflow.engine.options import EngineOptions, cast_bytes
from ckptflow.errors import InconsistentCheckpointError, UnsupportedCheckpointError, UsageError
from ckptflow.fingerprint import fingerprint_files, fingerprint_plan
from ckptflow.formats.base import Location, ReadOptions
from ckptflow.formats.recorded_checksums import RecordedChecksums
from ckptflow.formats.registry import locate, read
from ckptflow.manifest import CheckpointManifest
from ckptflow.output.quantization import with_quantization_of
from ckptflow.output.sentence_modules import module_files
from ckptflow.output.sidefiles import config_bytes, main_dtype, read_config, side_files, with_dtype
from ckptflow.output.workspace import Workspace
from ckptflow.plan import ConsolidationPlan, arrange_files, plan_from_manifest
from ckptflow.request import ConvertRequest, check_named
from ckptflow.tensors import check_tiling
from ckptflow.transforms.adapters import plan_adapter
from ckptflow.transforms.cast import cast
from ckptflow.transforms.code_bases.rename import use_names_of_transformers
from ckptflow.transforms.config_fit import check_fits_config, check_layers
from ckptflow.transforms.experts import split_experts
from ckptflow.transforms.prefix import without_wrapper_prefix
from ckptflow.transforms.saved_names import use_saved_names
from ckptflow.transforms.ties import resolve_ties

MODEL_CONFIGS = ("config.json", "generation_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion that is planned down to the byte offsets and has not begun.

    Attributes:
        request: what was asked.
        location: where the checkpoint was found.
        manifest: what is there.
        plan: what will be written, arranged into files.
        side: name → content of config, tokenizer and other side files.
        source_fingerprints: path relative to the checkpoint's root → fingerprint.
        recipe: the options that change the output's bytes.
        fingerprint: identity of all of it; the same fingerprint gives the same output bytes.
        recorded: checksums that the source's files record, read when they are asked for.
    """

    request: ConvertRequest
    location: Location
    manifest: CheckpointManifest
    plan: ConsolidationPlan
    side: Mapping[str, bytes]
    source_fingerprints: Mapping[str, str]
    recipe: Mapping[str, Any]
    fingerprint: str
    recorded: RecordedChecksums = field(default_factory=RecordedChecksums, compare=False)

    @property
    def workspace(self) -> Workspace:
        """Where it works."""
        return Workspace(out=Path(os.path.realpath(self.request.out)), fingerprint=self.fingerprint)

    @property
    def inputs(self) -> list[Path]:
        """Files and directories that it is made of."""
        named = (self.location.path, self.manifest.config_dir, self.request.config_dir, self.request.base_model)
        return [*filter(None, named), *(Path(file.path) for file in self.manifest.files)]

    @property
    def overwrite(self) -> bool:
        """Whether it may replace something else."""
        return self.request.overwrite

    @property
    def engine_options(self) -> EngineOptions:
        """How the engine runs; none of it changes the output's bytes."""
        r = self.request
        return EngineOptions(
            threads=r.threads,
            memory_budget_bytes=r.memory_budget_bytes,
            device=r.device,
            cast_bytes=cast_bytes(self.plan.tensors),
            allow_nonfinite=r.allow_nonfinite,
        )


def plan_conversion(request: ConvertRequest) -> Conversion:
    """Read the checkpoint's metadata and plan every output byte. Touches no tensor data and writes nothing.

    Raises:
        CheckpointError: the checkpoint is refused.
        UsageError: the options don't fit it.
    """
    check_named(request.config_dir, request.base_model)
    location = locate(request.path)
    manifest = without_wrapper_prefix(
        read(location, ReadOptions(config_dir=request.config_dir, base_model=request.base_model))
    )
    if manifest.doubt is not None:
        raise UsageError(
            manifest.doubt,
            file=location.path,
            fix="name the directory with the model's config.json with --config",
        )
    for fqn, source in manifest.tensors.items():
        check_tiling(fqn, source)
    config_dir = request.config_dir or manifest.config_dir
    config = read_config(config_dir)
    plan, adapter_files = plan_adapter(plan_from_manifest(manifest), manifest, request, config)
    stem = "adapter_model" if adapter_files else "model"
    if not adapter_files:
        plan = use_names_of_transformers(plan, config, config_dir, location.path)
        plan = split_experts(use_saved_names(plan, config), config)
    plan = cast(resolve_ties(plan, config), request.dtype, request.keep_dtype)
    config, notes = with_quantization_of(plan, config)
    plan = replace(plan, notes=(*plan.notes, *(() if adapter_files else notes)))
    _check_writable_dtypes(plan)
    # What save_pretrained left in one directory belongs together.
    apart = manifest.layout != "huggingface" or request.config_dir is not None
    if config_dir is not None and apart and not adapter_files:
        check_layers(plan, config, config_dir, location.path)
        check_fits_config(plan, config_dir, location.path)
    plan = arrange_files(plan, request.max_shard_bytes if stem == "model" else plan.nbytes + 1, stem)
    side = _side_content(config_dir, request, location, manifest, plan, config, adapter_files)
    fingerprints = fingerprint_files(manifest.files, location.root)
    recipe = recipe_of(request)
    identity = {
        "layout": manifest.layout,
        "sources": fingerprints,
        "plan": fingerprint_plan(plan, location.root),
        "recipe": recipe,
        "side": {name: hashlib.sha256(data).hexdigest() for name, data in side.items()},
    }
    return Conversion(
        request=request,
        location=location,
        manifest=manifest,
        plan=plan,
        side=side,
        source_fingerprints=fingerprints,
        recipe=recipe,
        fingerprint=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
    )


def recipe_of(request: ConvertRequest) -> dict[str, Any]:
    """The options that change the output's bytes, as the record holds them."""
    names = ("dtype", "keep_dtype", "max_shard_bytes", "adapter", "lora_alpha", "allow_nonfinite")
    recipe = {name: getattr(request, name) for name in names}
    return {**recipe, "keep_dtype": sorted(request.keep_dtype)}


def _check_writable_dtypes(plan: ConsolidationPlan) -> None:
    if not plan.tensors:
        raise InconsistentCheckpointError("the checkpoint holds no weights", fix="name the directory with the weights")
    for tensor in plan.tensors:
        if tensor.source.numel == 0:
            raise InconsistentCheckpointError(
                "a tensor without elements: a placeholder for weights that were not gathered",
                tensor=tensor.fqn,
                found=f"shape {list(tensor.shape)}",
                fix="convert the sharded files that hold its values, or save it gathered",
            )
        if tensor.dtype.code is None:
            raise UnsupportedCheckpointError(
                "safetensors can't hold this dtype", tensor=tensor.fqn, found=tensor.dtype.name
            )


def _side_content(
    config_dir: Path | None,
    request: ConvertRequest,
    location: Location,
    manifest: CheckpointManifest,
    plan: ConsolidationPlan,
    config: Mapping[str, Any],
    adapter_files: Mapping[str, bytes],
) -> dict[str, bytes]:
    side: dict[str, bytes] = {}
    if config_dir is not None:
        # A directory that a person named may hold links, as the Hub's cache does; one in the checkpoint may not.
        named = request.config_dir is not None or not config_dir.is_relative_to(location.root)
        root = Path("/") if named else location.root
        side = dict(side_files(config_dir, root))
        if manifest.layout == "huggingface" and request.config_dir is None:
            side |= dict(module_files(config_dir, root))
    if manifest.adapter is not None and manifest.adapter.separate and request.config_dir is None:
        # Tokens that were added while the adapter was trained stand in the tokenizer beside it, not in the base's.
        own = dict(side_files(location.root, location.root))
        side.update({name: data for name, data in own.items() if name not in MODEL_CONFIGS})
    if adapter_files:
        return {name: data for name, data in side.items() if name not in MODEL_CONFIGS} | dict(adapter_files)
    dtype = main_dtype(plan) if request.dtype == "source" else request.dtype
    if "config.json" in side and dtype is not None:
        side["config.json"] = config_bytes(with_dtype(config, dtype))
    return side
