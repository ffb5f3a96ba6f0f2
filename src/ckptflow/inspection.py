"""What a checkpoint holds, summed up for people and programs; reads metadata only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptflow.formats.base import ReadOptions
from ckptflow.formats.registry import locate, read
from ckptflow.manifest import CheckpointManifest
from ckptflow.request import check_named


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """A manifest in figures.

    Attributes:
        manifest: what was summed up.
        bytes_by_dtype: torch dtype name → bytes of the dense tensors, largest first.
        parameters: elements of all tensors, aliases not counted.
    """

    manifest: CheckpointManifest
    bytes_by_dtype: Mapping[str, int]
    parameters: int

    def to_json(self) -> dict[str, Any]:
        """The document behind ``inspect --json``: the facts, and every file and tensor."""
        m = self.manifest
        return {
            **self.facts(),
            "files": {file.path: file.nbytes for file in m.files},
            "tensors": {
                fqn: {"shape": list(t.shape), "dtype": t.dtype.name, "pieces": len(t.pieces)}
                for fqn, t in m.tensors.items()
            },
        }

    def facts(self) -> dict[str, Any]:
        """What people want to see first."""
        m = self.manifest
        return {
            "layout": m.layout,
            "path": str(m.path),
            "global_step": m.global_step,
            "world_size": m.world_size,
            "mesh": None if m.mesh is None else str(m.mesh),
            "tensor_count": len(m.tensors),
            "parameters": self.parameters,
            "bytes_by_dtype": dict(self.bytes_by_dtype),
            "tensor_bytes": sum(self.bytes_by_dtype.values()),
            "storage_bytes": m.storage_bytes,
            "wasted_bytes": m.wasted_bytes,
            "ties": dict(m.ties),
            "adapter": None if m.adapter is None else "LoRA",
            "config_dir": None if m.config_dir is None else str(m.config_dir),
            "left_out": [{"name": e.name, "reason": e.reason, "bytes": e.nbytes} for e in m.left_out],
            "notes": list(m.notes),
        }


def inspect_checkpoint(
    path: Path, *, config_dir: Path | None = None, base_model: Path | None = None
) -> CheckpointSummary:
    """Sum up the checkpoint at ``path``.

    Raises:
        CheckpointError: there is none, or it is refused.
        UsageError: a directory that is named is not there.
    """
    check_named(config_dir, base_model)
    return summarize(read(locate(path), ReadOptions(config_dir=config_dir, base_model=base_model)))


def summarize(manifest: CheckpointManifest) -> CheckpointSummary:
    """A manifest in figures."""
    sizes: Counter[str] = Counter()
    for source in manifest.tensors.values():
        sizes[source.dtype.name] += source.nbytes
    return CheckpointSummary(
        manifest=manifest,
        bytes_by_dtype=dict(sizes.most_common()),
        parameters=sum(source.numel for source in manifest.tensors.values()),
    )
