"""Weights inside the tensor classes in which torchao trains in float8 and the like, sharded by FSDP2 or whole."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from ckptflow.errors import UnsupportedCheckpointError
from ckptflow.formats.base import ReadOptions
from ckptflow.formats.registry import locate, read
from ckptflow.manifest import CheckpointManifest
from ckptflow.plan import plan_from_manifest
from ckptflow.validate.reread.choose import SourceReader
from rank_writer import mesh_of, save_ranks, sharded
from reading import read_source
from training_wrappers import Wrapped, in_dtensor, torchaos

FULL = torch.arange(24.0).view(6, 4)
CAST = "WeightWithDynamicFloat8CastTensor"
GROUPED = ("Float8TrainingWeightWrapperTensor", "torchao.prototype.moe_training.tensor")


def of_ranks(tmp_path: Path, kept: type[Wrapped]) -> Path:
    def state(_: int) -> dict[str, Any]:
        return {"w": in_dtensor(sharded(FULL, mesh_of([2]), [Shard(0)]), kept), "norm": torch.ones(3)}

    return save_ranks(tmp_path / "global_step_5" / "actor", 2, state)


def of_dcp(tmp_path: Path, kept: type[Wrapped], **options: Any) -> Path:
    path = tmp_path / "step-5"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in one process
        dcp.save({"model": {"w": kept(FULL, **options), "norm": torch.ones(3)}}, checkpoint_id=path, no_dist=True)
    return path


def of_file(tmp_path: Path, kept: type[Wrapped]) -> Path:
    torch.save({"w": kept(FULL), "norm": torch.ones(3)}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def manifest_at(path: Path) -> CheckpointManifest:
    return read(locate(path), ReadOptions())


@pytest.mark.parametrize("save", [of_ranks, of_dcp, of_file])
def test_a_weight_that_is_trained_inside_a_wrapper_is_that_weight(tmp_path: Path, save: Any) -> None:
    with torchaos(CAST) as kept:
        path = save(tmp_path, kept)
    manifest = manifest_at(path)
    assert set(manifest.tensors) == {"w", "norm"}
    assert torch.equal(torch.from_numpy(read_source(manifest.tensors["w"])), FULL)


@pytest.mark.parametrize("save", [of_ranks, of_dcp, of_file])
def test_the_second_readers_see_the_same_weight(tmp_path: Path, save: Any) -> None:
    with torchaos(CAST) as kept:
        path = save(tmp_path, kept)
    manifest = manifest_at(path)
    source = SourceReader(manifest)
    planned = next(t for t in plan_from_manifest(manifest).tensors if t.fqn == "w")
    assert torch.equal(source.read(planned, source.name_for(planned), (0, 0), (6, 4)), FULL)
    assert source.independent == {"w"}


def test_wrappers_of_grouped_experts_keep_it_under_another_name(tmp_path: Path) -> None:
    with torchaos(*GROUPED) as kept:
        path = of_dcp(tmp_path, kept, attribute="_data")
    assert torch.equal(torch.from_numpy(read_source(manifest_at(path).tensors["w"])), FULL)


@pytest.mark.parametrize("save", [of_ranks, of_dcp, of_file])
def test_a_class_that_computes_its_values_is_refused_as_that(tmp_path: Path, save: Any) -> None:
    with torchaos("Float8Tensor", "torchao.quantization") as kept:
        path = save(tmp_path, kept)
    with pytest.raises(UnsupportedCheckpointError, match="the bytes of a tensor are not its values") as error:
        manifest_at(path)
    assert "torchao.quantization.Float8Tensor" in str(error.value.found)


def test_a_wrapper_around_another_dtype_than_its_own_is_refused(tmp_path: Path) -> None:
    with torchaos(CAST) as kept:
        path = of_dcp(tmp_path, kept, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedCheckpointError, match="the bytes of a tensor are not its values"):
        manifest_at(path)
