"""FSDP rank files: every way of cutting a tensor comes back bit for bit, and contradictions are refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckptflow.errors import (
    AmbiguousCheckpointError,
    IncompleteCheckpointError,
    InconsistentCheckpointError,
    UnsafeFileError,
    UnsupportedCheckpointError,
)
from ckptflow.formats.base import ReadOptions
from ckptflow.formats.registry import check, locate, read
from ckptflow.manifest import CheckpointManifest, Mesh
from rank_writer import mesh_of, rank_name, save_ranks, sharded, sharded_pair
from reading import as_numpy, assert_same_bits, manifest_of, read_source

SHAPES = {"even": (8, 12), "uneven": (7, 5), "narrow": (3, 2), "vector": (5,), "one": (1,), "wide": (2, 3, 16)}


def values(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def assert_reads(path: Path, expected: Mapping[str, torch.Tensor]) -> CheckpointManifest:
    manifest = manifest_of(path)
    assert_same_bits(manifest.tensors, as_numpy(expected))
    return manifest


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dim", [0, -1])
def test_shards_of_any_world_size_come_back_whole(tmp_path: Path, world_size: int, dim: int) -> None:
    full = values(torch.bfloat16)

    def state(rank: int) -> dict[str, Any]:
        mesh = mesh_of([world_size], ["fsdp"])
        return {name: sharded(t, mesh, [Shard(dim % t.dim())]) for name, t in full.items()}

    manifest = assert_reads(save_ranks(tmp_path, world_size, state), full)
    assert manifest.mesh == Mesh(shape=(world_size,), dim_names=("fsdp",))
    assert manifest.world_size == world_size


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 3), [Shard(0), Replicate()]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), [Shard(1), Shard(0)]),
        ((2, 2), [Shard(0), Shard(0)]),
        ((3, 2), [Shard(1), Shard(1)]),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        ((2, 3), [_StridedShard(0, split_factor=3), Shard(0)]),
        ((3, 2), [_StridedShard(1, split_factor=2), Shard(1)]),
        ((2, 2), [_StridedShard(0, split_factor=5), Replicate()]),
        ((2, 2, 2), [Replicate(), _StridedShard(0, split_factor=2), Shard(0)]),
        ((2, 2, 2), [_StridedShard(0, split_factor=4), Shard(0), Shard(0)]),
        ((2, 2, 2), [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2), Shard(0)]),
        ((2, 2, 2), [Shard(1), _StridedShard(0, split_factor=2), Shard(0)]),
        ((2, 1, 2), [Replicate(), Shard(0), Shard(1)]),
        ((4,), [Replicate()]),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(16, 8), (24, 12), (13, 7), (9, 5)], ids=str)
def test_placements_on_meshes_of_several_dims_come_back_as_torch_cuts_them(
    tmp_path: Path, mesh_shape: tuple[int, ...], placements: list[Any], shape: tuple[int, ...]
) -> None:
    full = {"w": torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)}
    world_size = torch.Size(mesh_shape).numel()
    save_ranks(tmp_path, world_size, lambda rank: {"w": sharded(full["w"], mesh_of(mesh_shape), placements)})
    assert_reads(tmp_path, full)


@pytest.mark.parametrize("rows", [16, 9, 7, 5, 3])
def test_fully_sharded_tensor_parallel_layers_come_back_even_where_rows_do_not_divide(
    tmp_path: Path, rows: int
) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def model() -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(6, rows), torch.nn.LayerNorm(6), torch.nn.Linear(rows, 6))

    def state(rank: int) -> dict[str, Any]:
        mesh = mesh_of([2, 4, 2], ["replicate", "fsdp", "tp"])
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallel = parallelize_module(model(), mesh["tp"], plan, src_data_rank=None)
        return fully_shard(parallel, mesh=mesh["replicate", "fsdp"]).state_dict()

    save_ranks(tmp_path, 16, state)
    manifest = assert_reads(tmp_path, model().state_dict())
    assert manifest.mesh == Mesh(shape=(2, 4, 2), dim_names=("replicate", "fsdp", "tp"))
    assert not manifest.equal, "replicas were not proven by their checksums"


def test_a_mesh_that_lists_ranks_in_another_order_is_followed(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    full = torch.arange(20.0).reshape(10, 2)
    save_ranks(
        tmp_path, 4, lambda rank: {"w": sharded(full, DeviceMesh("cpu", torch.tensor([2, 0, 3, 1])), [Shard(0)])}
    )
    assert_reads(tmp_path, {"w": full})


@pytest.mark.parametrize("named", [True, False], ids=["named in the file", "by the mesh"])
def test_swapped_rank_files_are_refused(tmp_path: Path, named: bool) -> None:
    full = torch.arange(12.0).reshape(6, 2)
    save_ranks(tmp_path, 2, lambda rank: {"w": sharded(full, mesh_of([2], ["fsdp"]), [Shard(0)])}, named=named)
    first, second = (tmp_path / rank_name(2, rank) for rank in (0, 1))
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    with pytest.raises(InconsistentCheckpointError, match=r"saved (under|by) another rank"):
        manifest_of(tmp_path)


def test_ranks_outside_a_tensor_s_mesh_hold_nothing_of_it(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    full = torch.arange(12.0).reshape(6, 2)
    save_ranks(
        tmp_path,
        3,
        lambda rank: {
            "w": sharded(full, DeviceMesh("cpu", torch.tensor([0, 2])), [Shard(0)]),
            "n": sharded(full, mesh_of([3]), [Shard(0)]),
        },
    )
    assert_reads(tmp_path, {"w": full, "n": full})


@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
def test_sharded_tensors_come_back_without_a_process_group(tmp_path: Path) -> None:
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharding_spec import ShardMetadata

    full = torch.arange(35.0).reshape(7, 5)
    bounds = [(0, 3), (3, 6), (6, 7)]

    def state(rank: int) -> dict[str, Any]:
        regions = [ShardMetadata([a, 0], [b - a, 5], placement=f"rank:{r}/cpu") for r, (a, b) in enumerate(bounds)]
        metadata = ShardedTensorMetadata(regions, full.size(), TensorProperties(dtype=full.dtype))
        start, stop = bounds[rank]
        local = LocalShard(full[start:stop].clone(), regions[rank])
        return {"w": ShardedTensor._init_from_local_shards_and_global_metadata([local], metadata)}

    save_ranks(tmp_path, 3, state)
    assert_reads(tmp_path, {"w": full})


def test_plain_tensors_that_all_ranks_repeat_are_taken_once(tmp_path: Path) -> None:
    full = {"w": torch.arange(8.0), "buffer": torch.tensor([5.0]), "scalar": torch.tensor(3)}

    def state(rank: int) -> dict[str, Any]:
        return {**full, "w": sharded(full["w"], mesh_of([4]), [Shard(0)])}

    manifest = assert_reads(save_ranks(tmp_path, 4, state), full)
    assert not manifest.equal


def test_plain_tensors_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    save_ranks(tmp_path, 2, lambda rank: {"w": torch.full((4, 4), float(rank))})
    with pytest.raises(InconsistentCheckpointError, match="equal copies") as error:
        manifest_of(tmp_path)
    assert error.value.tensor == "w"


def test_plain_tensors_of_other_shapes_per_rank_are_refused(tmp_path: Path) -> None:
    save_ranks(tmp_path, 2, lambda rank: {"w": torch.zeros(4 + rank, 4)})
    with pytest.raises(InconsistentCheckpointError, match="shape"):
        manifest_of(tmp_path)


def test_copies_without_checksums_are_left_to_a_comparison_of_their_bytes(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save_ranks(tmp_path, 2, lambda rank: {"w": torch.full((4,), float(rank))})
    finally:
        torch.serialization.set_crc32_options(before)
    (check_bytes,) = manifest_of(tmp_path).equal
    assert read_source(check_bytes.first).tolist() == [0.0] * 4
    assert read_source(check_bytes.second).tolist() == [1.0] * 4


def test_a_world_of_one_holds_plain_tensors(tmp_path: Path) -> None:
    full = values()
    assert_reads(save_ranks(tmp_path, 1, lambda rank: full), full)


def test_views_of_a_larger_storage_are_read_through_their_strides_and_counted_as_waste(tmp_path: Path) -> None:
    big = torch.arange(60.0).reshape(6, 10)
    save_ranks(tmp_path, 1, lambda rank: {"column": big[:, 2:4], "turned": big.t()[:3]})
    manifest = assert_reads(tmp_path, {"column": big[:, 2:4], "turned": big.t()[:3]})
    assert manifest.storage_bytes == 240
    assert 0 < manifest.wasted_bytes < 240


def test_tensors_on_one_storage_in_every_rank_are_tied(tmp_path: Path) -> None:
    full = torch.arange(12.0).reshape(6, 2)

    def state(rank: int) -> dict[str, Any]:
        part = sharded(full, mesh_of([2]), [Shard(0)])
        return {"embed": part, "head": part, "copy": sharded(full, mesh_of([2]), [Shard(0)])}

    manifest = manifest_of(save_ranks(tmp_path, 2, state))
    assert manifest.ties == {"head": "embed"}
    assert set(manifest.tensors) == {"embed", "copy"}


def test_wrapper_parts_are_removed_from_names(tmp_path: Path) -> None:
    w = torch.arange(4.0)
    state = {
        "module._fsdp_wrapped_module.a._checkpoint_wrapped_module.weight": w,
        "module._orig_mod.b.module.weight": w + 1,
    }
    assert_reads(save_ranks(tmp_path, 1, lambda rank: state), {"a.weight": w, "b.module.weight": w + 1})


def test_names_that_become_one_without_wrapper_parts_are_refused(tmp_path: Path) -> None:
    state = {"_orig_mod.w": torch.zeros(2), "w": torch.ones(2)}
    with pytest.raises(InconsistentCheckpointError, match="one name"):
        manifest_of(save_ranks(tmp_path, 1, lambda rank: state))


def test_trl_value_heads_keep_their_names_and_the_model_loses_its_prefix(tmp_path: Path) -> None:
    state = {"pretrained_model.lm_head.weight": torch.zeros(2), "v_head.summary.weight": torch.ones(2)}
    manifest = manifest_of(save_ranks(tmp_path, 1, lambda rank: state))
    assert set(manifest.tensors) == {"lm_head.weight", "v_head.summary.weight"}
    assert any("value head" in note for note in manifest.notes)


def test_a_missing_rank_is_incomplete_and_named(tmp_path: Path) -> None:
    full = torch.zeros(8, 2)
    save_ranks(tmp_path, 4, lambda rank: {"w": sharded(full, mesh_of([4]), [Shard(0)])})
    (tmp_path / rank_name(4, 2)).unlink()
    with pytest.raises(IncompleteCheckpointError, match="missing") as error:
        manifest_of(tmp_path)
    assert "rank 2" in str(error.value)


def two_sets(directory: Path) -> torch.Tensor:
    full = torch.arange(12.0).reshape(6, 2)
    for world_size in (2, 3):
        save_ranks(directory, world_size, lambda rank, w=world_size: {"w": sharded(full * w, mesh_of([w]), [Shard(0)])})
    return full


def test_the_config_says_which_of_two_saves_in_one_directory_is_meant(tmp_path: Path) -> None:
    full = two_sets(tmp_path)
    (tmp_path / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 3}))
    manifest = assert_reads(tmp_path, {"w": full * 3})
    assert [entry.name for entry in manifest.left_out] == [rank_name(2, 0), rank_name(2, 1)]


def test_two_saves_in_one_directory_without_a_config_are_ambiguous(tmp_path: Path) -> None:
    two_sets(tmp_path)
    with pytest.raises(AmbiguousCheckpointError):
        manifest_of(tmp_path)


def test_a_config_of_another_world_size_is_refused(tmp_path: Path) -> None:
    sharded_pair(tmp_path)
    (tmp_path / "fsdp_config.json").write_text(json.dumps({"world_size": 8}))
    with pytest.raises(InconsistentCheckpointError, match="another world size"):
        manifest_of(tmp_path)


def test_a_rank_file_that_is_a_link_out_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    actor = sharded_pair(tmp_path / "actor")
    elsewhere = tmp_path / "elsewhere.pt"
    (actor / rank_name(2, 1)).rename(elsewhere)
    (actor / rank_name(2, 1)).symlink_to(elsewhere)
    with pytest.raises(UnsafeFileError, match="out of the checkpoint"):
        manifest_of(actor)


def test_optimizer_and_random_state_are_left_out_whatever_they_hold(tmp_path: Path) -> None:
    sharded_pair(tmp_path)
    (tmp_path / "optim_world_size_2_rank_0.pt").write_bytes(b"not even a torch file")
    (tmp_path / "extra_state_world_size_2_rank_0.pt").write_bytes(b"")
    reasons = {entry.name: entry.reason for entry in manifest_of(tmp_path).left_out}
    assert "optimizer" in reasons["optim_world_size_2_rank_0.pt"]
    assert "extra_state_world_size_2_rank_0.pt" in reasons


def test_entries_that_are_no_tensors_are_left_out_by_name(tmp_path: Path) -> None:
    manifest = manifest_of(save_ranks(tmp_path, 1, lambda rank: {"w": torch.zeros(2), "step": 7}))
    assert [(entry.name, "int" in entry.reason) for entry in manifest.left_out] == [("step", True)]


def test_a_nested_checkpoint_is_refused_rather_than_read_in_part(tmp_path: Path) -> None:
    save_ranks(tmp_path, 1, lambda rank: {"w": torch.zeros(2), "optimizer": {"state": [torch.zeros(2)]}})
    with pytest.raises(UnsupportedCheckpointError, match="nested"):
        manifest_of(tmp_path)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A finished step of a run, with its tracker."""
    actor = sharded_pair(tmp_path / "global_step_10" / "actor")
    (actor / "huggingface").mkdir()
    (actor / "huggingface" / "config.json").write_text("{}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    return actor


def test_a_step_directory_tells_role_step_and_config(step: Path) -> None:
    location = locate(step.parent)
    assert (location.path, location.root, location.role, location.global_step) == (step, step.parent, "actor", 10)
    assert read(location, ReadOptions()).config_dir == step / "huggingface"
    assert check(location).state == "complete"


def test_a_cut_rank_file_is_in_progress_until_the_tracker_names_the_step(step: Path) -> None:
    file = step / rank_name(2, 1)
    file.write_bytes(file.read_bytes()[:-100])
    assert check(locate(step)).state == "incomplete"
    (step.parent.parent / "latest_checkpointed_iteration.txt").write_text("5")
    assert check(locate(step)).state == "in-progress"
    with pytest.raises(IncompleteCheckpointError):
        manifest_of(step)


def test_a_tracker_that_lags_behind_counts_only_while_the_save_is_young(step: Path) -> None:
    (step.parent.parent / "latest_checkpointed_iteration.txt").write_text("5")
    assert check(locate(step)).state == "in-progress"
    for rank in range(2):
        os.utime(step / rank_name(2, rank), (1e9, 1e9))
    assert check(locate(step)).state == "complete"
    assert manifest_of(step).tensors, "a path that a person gives is judged by its content"


def test_a_run_without_a_tracker_is_judged_by_its_files(step: Path) -> None:
    (step.parent.parent / "latest_checkpointed_iteration.txt").unlink()
    assert check(locate(step)).state == "complete"
    shutil.rmtree(step.parent / "actor" / "huggingface")
    assert manifest_of(step).config_dir is None
