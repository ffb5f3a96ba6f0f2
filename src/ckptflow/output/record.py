"""``ckptflow.json``: what was done, from which bytes, with which result. And the index beside several weight files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ckptflow
from ckptflow.engine.checksums import Compared
from ckptflow.engine.record import WeightFileRecord
from ckptflow.errors import CheckpointError
from ckptflow.files.jsonfiles import read_json_object
from ckptflow.files.kinds import RECORD_NAME
from ckptflow.manifest import CheckpointManifest
from ckptflow.plan import ConsolidationPlan

RECORD_FORMAT = 1
INDEX_SUFFIX = ".safetensors.index.json"


def weight_index(plan: ConsolidationPlan) -> dict[str, Any]:
    """``model.safetensors.index.json`` as transformers writes it; total_size in bytes of tensor data."""
    weight_map = {t.fqn: file.name for file in plan.files for t in file.tensors}
    return {"metadata": {"total_size": plan.nbytes}, "weight_map": dict(sorted(weight_map.items()))}


def conversion_record(
    *,
    fingerprint: str,
    manifest: CheckpointManifest,
    plan: ConsolidationPlan,
    recipe: Mapping[str, Any],
    source_files: Mapping[str, Mapping[str, Any]],
    compared: Compared,
    weight_files: Sequence[WeightFileRecord],
    files: Mapping[str, Mapping[str, Any]],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The content of ``ckptflow.json``. It holds no times and no absolute paths: the same work gives the same bytes."""
    planned = {t.fqn: t for t in plan.tensors}
    tensors = {}
    for weight_file in weight_files:
        for record in weight_file.tensors:
            tensor = planned[record.fqn]
            entry = {"file": weight_file.name, **record.to_json()}
            entry.pop("fqn", None)
            entry["source"] = list(tensor.source_fqns)
            entry["source_dtype"] = tensor.source.dtype.name
            if tensor.kept_reason is not None:
                entry["kept_reason"] = tensor.kept_reason
            kinds = [manifest.kinds[fqn] for fqn in tensor.source_fqns if fqn in manifest.kinds]
            if kinds:
                entry["kind"] = kinds[0]
            if tensor.fold is not None:
                entry["lora_scale"] = tensor.fold.scale
            tensors[record.fqn] = entry
    return {
        "format": RECORD_FORMAT,
        "fingerprint": fingerprint,
        "created_by": f"ckptflow {ckptflow.__version__}",
        "source": {
            "name": "/".join(manifest.path.parts[-3:]),
            "layout": manifest.layout,
            "global_step": manifest.global_step,
            "world_size": manifest.world_size,
            "mesh": None if manifest.mesh is None else str(manifest.mesh),
            "files": source_files,
            "checksums": {"storages": compared.storages, "bytes": compared.nbytes},
        },
        "recipe": dict(recipe),
        "files": files,
        "tensors": tensors,
        "ties": dict(plan.ties),
        "left_out": [{"name": e.name, "reason": e.reason, "bytes": e.nbytes} for e in plan.left_out],
        "notes": list(notes),
    }


def read_record(out: Path) -> dict[str, Any] | None:
    """The record in a directory; None where there is none that can be read."""
    try:
        record = read_json_object(out / RECORD_NAME)
    except CheckpointError:
        return None
    return record if _is_record(record) else None


def _is_record(record: Mapping[str, Any]) -> bool:
    """Whether it has the shape that readers rely on, whatever it says."""
    files, tensors, recipe = (record.get(name, {}) for name in ("files", "tensors", "recipe"))
    if not all(isinstance(part, dict) for part in (files, tensors, recipe)):
        return False
    return all(isinstance(entry, dict) for entry in tensors.values()) and all(
        isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)
        for entry in files.values()
    )
