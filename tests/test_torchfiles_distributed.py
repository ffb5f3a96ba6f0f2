"""Tensors of several ranks in torch files, and the metadata of distributed checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptflow.torchfiles import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    ShardedTensor,
    StridedShard,
    open_torch_file,
    read_pickle,
    stub_state,
)
from torch_values import assert_same, quiet_torch

torch = pytest.importorskip("torch")

pytestmark = quiet_torch


@pytest.fixture
def fake_rank() -> Iterator[Callable[[int, int], None]]:
    """Makes this process rank r of w, without peers."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def become(rank: int, world_size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


class TestDistributedTensors:
    def test_a_shard_on_one_axis(
        self, tmp_path: Path, fake_rank: Callable[[int, int], None], capfd: pytest.CaptureFixture[str]
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor as TorchDTensor
        from torch.distributed.tensor import Shard as TorchShard

        for rank in range(2):
            fake_rank(rank, 2)
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
            local = torch.full((3, 4), float(rank))
            torch.save({"w": TorchDTensor.from_local(local, mesh, [TorchShard(0)])}, tmp_path / f"rank_{rank}.pt")
        opened = open_torch_file(tmp_path / "rank_1.pt")
        tensor = opened.value["w"]
        assert isinstance(tensor, DTensor)
        assert (tensor.shape, tensor.strides, tensor.dtype_name) == ((6, 4), (4, 1), "float32")
        assert tensor.placements == (Shard(0),)
        assert tensor.mesh == DeviceMesh((2,), ((0, 1),), ("fsdp",), "cpu", saved_coordinate=(1,))
        assert_same(tensor.local, torch.full((3, 4), 1.0))
        assert opened.foreign_globals == ()

    def test_two_axes_sub_meshes_and_strided_shards(
        self, tmp_path: Path, fake_rank: Callable[[int, int], None]
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor as TorchDTensor
        from torch.distributed.tensor import Replicate as TorchReplicate
        from torch.distributed.tensor import Shard as TorchShard
        from torch.distributed.tensor.placement_types import _StridedShard

        fake_rank(4, 6)
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        local = torch.ones(2, 2)
        torch.save(
            {
                "both": TorchDTensor.from_local(local, mesh, [TorchReplicate(), TorchShard(1)]),
                "dp": TorchDTensor.from_local(local, mesh["dp"], [TorchShard(0)]),
                "tp": TorchDTensor.from_local(local, mesh["tp"], [TorchShard(0)]),
                "strided": TorchDTensor.from_local(
                    local,
                    mesh,
                    [_StridedShard(0, split_factor=3), TorchShard(0)],
                    shape=torch.Size((12, 2)),
                    stride=(2, 1),
                ),
                "parameter": torch.nn.Parameter(TorchDTensor.from_local(local, mesh["tp"], [TorchShard(0)])),
            },
            tmp_path / "rank_4.pt",
        )
        value = open_torch_file(tmp_path / "rank_4.pt").value
        assert value["both"].placements == (Replicate(), Shard(1))
        assert value["both"].mesh.shape == (2, 3)
        assert value["both"].mesh.groups == ((0, 1, 2, 3, 4, 5),)
        assert value["both"].mesh.coordinate_of(4) == (1, 1)
        assert value["dp"].mesh.groups == ((0, 3), (1, 4), (2, 5))
        assert value["dp"].mesh.coordinate_of(4) == (1,)
        assert value["tp"].mesh.groups == ((0, 1, 2), (3, 4, 5))
        assert value["tp"].mesh.coordinate_of(4) == (1,)
        assert value["tp"].mesh.coordinate_of(9) is None
        assert value["strided"].placements == (StridedShard(0, 3), Shard(0))
        assert value["parameter"].requires_grad
        assert value["both"].mesh is value["strided"].mesh

    def test_a_mesh_of_shuffled_ranks(self, tmp_path: Path, fake_rank: Callable[[int, int], None]) -> None:
        from torch.distributed.device_mesh import DeviceMesh as TorchMesh
        from torch.distributed.tensor import DTensor as TorchDTensor
        from torch.distributed.tensor import Shard as TorchShard

        fake_rank(0, 4)
        mesh = TorchMesh("cpu", torch.tensor([[3, 1], [0, 2]]))
        local = TorchDTensor.from_local(torch.ones(1, 2), mesh, [TorchShard(0), TorchShard(1)])
        torch.save(local, tmp_path / "rank_0.pt", _use_new_zipfile_serialization=False)
        found = open_torch_file(tmp_path / "rank_0.pt").value
        assert found.mesh.groups == ((3, 1, 0, 2),)
        assert found.mesh.dim_names is None
        assert found.mesh.coordinate_of(0) == (1, 0)

    @pytest.mark.filterwarnings("ignore")
    def test_a_sharded_tensor(self, tmp_path: Path, fake_rank: Callable[[int, int], None]) -> None:
        from torch.distributed._shard import sharded_tensor
        from torch.distributed._shard.metadata import ShardMetadata

        fake_rank(1, 2)
        regions = [ShardMetadata([row, 0], [2, 3], f"rank:{rank}/cpu") for rank, row in ((0, 0), (1, 2))]
        shard = sharded_tensor.Shard(torch.full((2, 3), 7.0), regions[1])
        metadata = sharded_tensor.ShardedTensorMetadata(
            regions, torch.Size((4, 3)), sharded_tensor.TensorProperties(dtype=torch.float32)
        )
        tensor = sharded_tensor.ShardedTensor._init_from_local_shards_and_global_metadata([shard], metadata)
        torch.save({"w": tensor}, tmp_path / "rank_1.pt")
        found = open_torch_file(tmp_path / "rank_1.pt").value["w"]
        assert isinstance(found, ShardedTensor)
        assert (found.shape, found.dtype_name) == ((4, 3), "float32")
        assert [region.offsets for region in found.all_regions] == [(0, 0), (2, 0)]
        assert found.local_shards[0].region.placement == "rank:1/cpu"
        assert_same(found.local_shards[0].tensor, torch.full((2, 3), 7.0))


class TestFilesOfOlderReleases:
    def test_a_mesh_kept_as_a_tensor_is_read_from_the_file(self, fixtures_dir: Path) -> None:
        step = fixtures_dir / "fsdp1_torch24_w2_dtensor" / "input" / "global_step_10" / "actor"
        opened = open_torch_file(step / "model_world_size_2_rank_1.pt")
        meshes = {tensor.mesh for tensor in opened.value.values()}
        assert meshes == {DeviceMesh((2,), ((0, 1),), ("fsdp",), "cpu", saved_coordinate=(1,))}

    def test_weights_keep_the_device_that_they_were_saved_on(self, fixtures_dir: Path) -> None:
        step = fixtures_dir / "fsdp2_torch24_w2_cuda_tags" / "input" / "global_step_10" / "actor"
        opened = open_torch_file(step / "model_world_size_2_rank_1.pt")
        assert {tensor.local.storage.device for tensor in opened.value.values()} == {"cuda:1"}
        assert {tensor.mesh.groups for tensor in opened.value.values()} == {((0, 1),)}

    def test_a_sharded_tensor_of_torch_24(self, fixtures_dir: Path) -> None:
        step = fixtures_dir / "fsdp1_torch24_w2_shardedtensor" / "input" / "global_step_10" / "actor"
        opened = open_torch_file(step / "model_world_size_2_rank_0.pt")
        assert {type(tensor) for tensor in opened.value.values()} == {ShardedTensor}


def test_the_metadata_of_a_distributed_checkpoint_is_readable(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": {"w": torch.arange(6.0).reshape(2, 3)}}, checkpoint_id=tmp_path, no_dist=True)
    metadata = stub_state(read_pickle((tmp_path / ".metadata").read_bytes(), ".metadata"))
    assert stub_state(metadata["state_dict_metadata"]["model.w"])["size"] == (2, 3)
    ((index, place),) = metadata["storage_data"].items()
    assert stub_state(index)["fqn"] == "model.w"
    where = stub_state(place)
    opened = open_torch_file(tmp_path / where["relative_path"], offset=where["offset"], length=where["length"])
    assert_same(opened.value, torch.arange(6.0).reshape(2, 3))
