"""Torch files of every kind, written by torch itself, read without it and compared bit for bit."""

from __future__ import annotations

import argparse
import collections
import io
import os
import pickle
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptflow.errors import (
    CheckpointError,
    CorruptFileError,
    IncompleteCheckpointError,
    UnsafeFileError,
    UnsupportedCheckpointError,
)
from ckptflow.torchfiles import (
    DeviceMesh,
    DTensor,
    LazyStorage,
    LazyTensor,
    MetaTensor,
    Replicate,
    Shard,
    ShardedTensor,
    StridedShard,
    Stub,
    TorchFile,
    open_torch_file,
    read_pickle,
    stub_name,
    stub_state,
    unsupported_tensor_kind,
)

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings(
    "ignore:TypedStorage is deprecated",
    "ignore:torch.quantize_per_tensor",
    "ignore:torch.distributed is disabled",
)


class Recipe:
    """A class that readers don't have."""

    def __init__(self, lr: float) -> None:
        self.lr = lr


def values_of(tensor: LazyTensor) -> object:
    """The tensor as torch sees it, from nothing but the offsets that the reader gave."""
    storage = tensor.storage
    with open(storage.path, "rb") as file:
        data = bytearray(os.pread(file.fileno(), storage.nbytes, storage.offset))
    dtype = getattr(torch, tensor.dtype_name)
    if not data:
        return torch.empty(tensor.shape, dtype=dtype)
    whole = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(whole, tensor.storage_offset, tensor.shape, tensor.strides)


def assert_same(tensor: object, expected: object) -> None:
    """Bit for bit, shape and dtype included."""
    assert isinstance(tensor, LazyTensor)
    found = values_of(tensor)
    assert found.dtype == expected.dtype
    assert tuple(found.shape) == tuple(expected.shape)
    assert found.contiguous().flatten().view(torch.uint8).equal(expected.contiguous().flatten().view(torch.uint8))


@pytest.fixture(params=["zip", "legacy"])
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[object], TorchFile]:
    """Saves in one of both formats and opens again."""

    def save_and_open(value: object) -> TorchFile:
        path = tmp_path / "saved.pt"
        torch.save(value, path, _use_new_zipfile_serialization=request.param == "zip")
        opened = open_torch_file(path)
        assert opened.format == request.param
        return opened

    return save_and_open


Save = Callable[[object], TorchFile]

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64"]


class TestTensors:
    @pytest.mark.parametrize("name", DTYPES)
    def test_each_dtype_comes_back_bit_for_bit(self, save: Save, name: str) -> None:
        expected = torch.arange(-6, 6).reshape(3, 4).to(getattr(torch, name))
        assert_same(save({"w": expected}).value["w"], expected)

    @pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64"])
    def test_dtypes_without_a_storage_class_come_back_too(self, save: Save, name: str) -> None:
        expected = torch.arange(8, dtype=torch.uint8).view(getattr(torch, name))
        assert_same(save([expected]).value[0], expected)

    def test_views_keep_their_window_and_share_the_storage(self, save: Save) -> None:
        base = torch.arange(20.0).reshape(4, 5)
        opened = save({"base": base, "rows": base[1:3], "columns": base[:, :2], "transposed": base.t()})
        for name, expected in {"rows": base[1:3], "columns": base[:, :2], "transposed": base.t()}.items():
            assert_same(opened.value[name], expected)
            assert opened.value[name].storage is opened.value["base"].storage
        columns = opened.value["columns"]
        assert not columns.is_contiguous
        assert columns.nbytes == 8 * 4
        assert columns.extent_bytes == (3 * 5 + 1 + 1) * 4
        assert opened.value["rows"].is_contiguous
        assert opened.value["rows"].byte_offset == columns.storage.offset + 20
        assert len(opened.storages) == 1

    def test_tied_tensors_are_equal_and_equal_copies_are_not(self, save: Save) -> None:
        weight = torch.ones(3, 3)
        opened = save({"a": weight, "b": weight, "c": weight.clone()})
        assert opened.value["a"] == opened.value["b"]
        assert len({opened.value["a"], opened.value["b"]}) == 1
        assert opened.value["a"] != opened.value["c"]

    def test_scalars_and_empty_tensors_have_their_shapes(self, save: Save) -> None:
        opened = save({"scalar": torch.tensor(5.0), "empty": torch.empty(0, 4), "expanded": torch.ones(1).expand(6, 2)})
        assert opened.value["scalar"].shape == ()
        assert opened.value["empty"].shape == (0, 4)
        assert opened.value["empty"].extent_bytes == 0
        assert opened.value["expanded"].strides == (0, 0)
        assert_same(opened.value["scalar"], torch.tensor(5.0))

    def test_parameters_say_so(self, save: Save) -> None:
        opened = save(
            {"w": torch.nn.Parameter(torch.ones(2)), "f": torch.nn.Parameter(torch.ones(2), requires_grad=False)}
        )
        assert opened.value["w"].is_parameter
        assert opened.value["w"].requires_grad
        assert opened.value["f"].is_parameter
        assert not opened.value["f"].requires_grad

    def test_conjugate_and_negative_views_are_flagged(self, save: Save) -> None:
        value = torch.tensor([1 + 2j, 3 - 4j])
        conj = save({"conj": value.conj(), "plain": value}).value
        assert (conj["conj"].conj, conj["conj"].neg) == (True, False)
        assert not conj["plain"].conj
        assert save(value.conj().imag).value.neg

    def test_sparse_quantized_and_meta_tensors_load_without_values(self, save: Save) -> None:
        opened = save(
            {
                "sparse": torch.eye(3).to_sparse(),
                "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
                "meta": torch.empty(2, 3, device="meta"),
                "plain": torch.ones(1),
            }
        )
        assert stub_name(opened.value["sparse"]) == "torch._utils._rebuild_sparse_tensor"
        assert unsupported_tensor_kind(opened.value["sparse"]) == "sparse"
        assert unsupported_tensor_kind(opened.value["quantized"]) == "quantized"
        assert unsupported_tensor_kind(opened.value["plain"]) is None
        assert opened.value["meta"] == MetaTensor("float32", (2, 3))
        assert_same(opened.value["plain"], torch.ones(1))

    def test_tensor_subclasses_give_their_name(self, save: Save) -> None:
        opened = save(torch.ones(2).as_subclass(Marked))
        assert opened.value.subclass == f"{__name__}.Marked"

    def test_lazy_records_travel_between_processes(self, save: Save) -> None:
        opened = save({"w": torch.ones(2, 3)})
        copy = pickle.loads(pickle.dumps(opened.value["w"]))  # noqa: S301 - our own bytes
        assert (copy.shape, copy.byte_offset) == ((2, 3), opened.value["w"].byte_offset)


class Marked(torch.Tensor):
    """A subclass without data of its own."""


class TestOtherValues:
    def test_plain_values_and_containers_come_back_as_they_are(self, save: Save) -> None:
        value = {
            "step": 7,
            "lr": 1e-4,
            "names": ["a", ("b", None)],
            "flags": {True, False},
            "frozen": frozenset({1}),
            "raw": b"\x00\xff",
            "big": 2**100,
            3: "int key",
        }
        assert save(value).value == value

    def test_ordered_and_default_dicts_come_back_as_dicts(self, save: Save) -> None:
        default = collections.defaultdict(list)
        default["a"].append(1)
        opened = save([torch.nn.Linear(2, 2).state_dict(), default, collections.Counter("aab")])
        assert isinstance(opened.value[0], collections.OrderedDict)
        assert list(opened.value[0]) == ["weight", "bias"]
        assert opened.value[0]._metadata[""] == {"version": 1}
        assert opened.value[1] == {"a": [1]}
        assert opened.value[2] == {"a": 2, "b": 1}

    def test_a_namespace_and_own_classes_become_stubs_with_their_state(self, save: Save) -> None:
        opened = save({"args": argparse.Namespace(tp=2), "recipe": Recipe(0.5), "w": torch.ones(2)})
        assert stub_name(opened.value["args"]) == "argparse.Namespace"
        assert stub_state(opened.value["args"]) == {"tp": 2}
        assert isinstance(opened.value["recipe"], Stub)
        assert stub_state(opened.value["recipe"]) == {"lr": 0.5}
        assert opened.foreign_globals == (f"{__name__}.Recipe",)
        assert_same(opened.value["w"], torch.ones(2))

    @pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
    def test_a_whole_module_gives_its_parameters(self, save: Save) -> None:
        module = torch.nn.Linear(2, 3)
        opened = save(module)
        assert_same(stub_state(opened.value)["_parameters"]["weight"], module.weight.detach())

    def test_numpy_arrays_are_stubs(self, save: Save) -> None:
        numpy = pytest.importorskip("numpy")
        opened = save({"rng": numpy.random.RandomState(0).get_state(), "mean": numpy.float64(2)})
        assert opened.value["rng"][0] == "MT19937"
        assert isinstance(opened.value["rng"][1], Stub)
        assert opened.foreign_globals == ()

    def test_paths_are_texts(self, save: Save) -> None:
        assert save([Path("/data/run"), Path("a/b")]).value == ["/data/run", "a/b"]


class TestZipFiles:
    def test_the_records_of_a_zip_are_reachable(self, tmp_path: Path) -> None:
        path = tmp_path / "saved.pt"
        torch.save({"w": torch.ones(5)}, path)
        opened = open_torch_file(path)
        archive = opened.read_archive()
        assert archive is not None
        with zipfile.ZipFile(path) as reference:
            assert list(archive.records) == reference.namelist()
            assert all(archive.read(name) == reference.read(name) for name in archive.records)
        record = archive.records["saved/data/0"]
        assert (record.offset, record.nbytes, record.crc32) == (
            opened.storages[0].offset,
            20,
            opened.storages[0].crc32,
        )
        assert archive.records["saved/data.pkl"].offset == opened.pickle_offset

    def test_a_torch_file_inside_a_larger_file_is_read_by_its_window(self, tmp_path: Path) -> None:
        parts = []
        for fill in (1.0, 2.0):
            buffer = io.BytesIO()
            torch.save(torch.full((3,), fill), buffer)
            parts.append(buffer.getvalue())
        path = tmp_path / "__0_0.distcp"
        path.write_bytes(b"".join(parts))
        second = open_torch_file(path, offset=len(parts[0]), length=len(parts[1]))
        assert_same(second.value, torch.full((3,), 2.0))

    def test_checksums_that_were_left_out_are_none(self, tmp_path: Path) -> None:
        from torch.utils.serialization import config

        with config.patch("save.use_pinned_memory_for_d2h", False):
            before = torch.serialization.get_crc32_options()
            torch.serialization.set_crc32_options(False)
            try:
                torch.save({"w": torch.ones(5)}, tmp_path / "saved.pt")
            finally:
                torch.serialization.set_crc32_options(before)
        opened = open_torch_file(tmp_path / "saved.pt")
        assert opened.storages[0].crc32 is None
        assert_same(opened.value["w"], torch.ones(5))

    def test_more_records_than_16_bits_count(self, tmp_path: Path) -> None:
        path = tmp_path / "many.pt"
        torch.save({f"w{i}": torch.full((1,), i) for i in range(70_000)}, path)
        opened = open_torch_file(path)
        assert len(opened.storages) == 70_000
        assert_same(opened.value["w69999"], torch.full((1,), 69_999))

    def test_a_damaged_pickle_is_found_by_its_checksum(self, tmp_path: Path) -> None:
        path = tmp_path / "saved.pt"
        torch.save({"weight": torch.ones(2)}, path)
        data = path.read_bytes()
        path.write_bytes(data.replace(b"weight", b"weighs", 1))
        with pytest.raises(CorruptFileError, match="checksum"):
            open_torch_file(path)

    def test_compressed_records_are_refused(self, tmp_path: Path) -> None:
        torch.save({"w": torch.ones(2)}, tmp_path / "saved.pt")
        with (
            zipfile.ZipFile(tmp_path / "saved.pt") as source,
            zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as target,
        ):
            for name in source.namelist():
                target.writestr(name, source.read(name))
        with pytest.raises(UnsafeFileError, match="compressed"):
            open_torch_file(tmp_path / "packed.pt")

    def test_two_records_of_one_name_are_refused(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "twice.pt", "w") as target:
            target.writestr("a/data.pkl", b"N.")
            with pytest.warns(UserWarning, match="Duplicate"):
                target.writestr("a/data.pkl", b"N.")
        with pytest.raises(CorruptFileError, match="same name"):
            open_torch_file(tmp_path / "twice.pt")

    def test_overlapping_records_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "overlap.pt"
        with zipfile.ZipFile(path, "w") as target:
            target.writestr("a/data.pkl", b"N.")
            target.writestr("a/data/0", b"12345678")
        data = bytearray(path.read_bytes())
        second = data.rfind(b"PK\x01\x02")
        data[second + 42 : second + 46] = bytes(4)
        path.write_bytes(data)
        with pytest.raises(CorruptFileError, match="overlaps"):
            open_torch_file(path)

    def test_another_byte_order_is_refused(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "big.pt", "w") as target:
            target.writestr("a/data.pkl", b"N.")
            target.writestr("a/byteorder", b"big")
        with pytest.raises(UnsupportedCheckpointError, match="byte order"):
            open_torch_file(tmp_path / "big.pt")

    def test_a_torchscript_program_is_named(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "script.pt", "w") as target:
            target.writestr("a/data.pkl", b"N.")
            target.writestr("a/constants.pkl", b"N.")
        with pytest.raises(UnsupportedCheckpointError, match="TorchScript"):
            open_torch_file(tmp_path / "script.pt")

    def test_a_zip_of_something_else_is_refused(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "doc.zip", "w") as target:
            target.writestr("readme.txt", b"hello")
        with pytest.raises(CorruptFileError, match=r"not one that torch\.save wrote"):
            open_torch_file(tmp_path / "doc.zip")

    def test_a_storage_shorter_than_its_pickle_says_is_refused(self, tmp_path: Path) -> None:
        torch.save({"w": torch.ones(4)}, tmp_path / "saved.pt")
        with zipfile.ZipFile(tmp_path / "saved.pt") as source, zipfile.ZipFile(tmp_path / "short.pt", "w") as target:
            for name in source.namelist():
                data = source.read(name)
                target.writestr(name, data[:-4] if name.endswith("data/0") else data)
        with pytest.raises(CorruptFileError, match="another size"):
            open_torch_file(tmp_path / "short.pt")


class TestFilesThatAreNone:
    @pytest.mark.parametrize(
        ("content", "error", "look"),
        [
            (b"", CorruptFileError, "empty"),
            (b"<!DOCTYPE html><html></html>", CorruptFileError, "HTML"),
            (b'{"error": "not found"}', CorruptFileError, "JSON"),
            (b"Entry not found", CorruptFileError, "Entry not found"),
            (os.urandom(8) + b"\xfe\xfd" * 300, CorruptFileError, "unknown bytes"),
            (b"version https://git-lfs.github.com/spec/v1\n", IncompleteCheckpointError, "git lfs pull"),
            (bytes(5000), IncompleteCheckpointError, "zeros"),
            (pickle.dumps({"a": 1}), CorruptFileError, r"torch\.save didn't write"),
            (b"\x10\0\0\0\0\0\0\0{}              ", CorruptFileError, "safetensors"),
            (b"PK", IncompleteCheckpointError, "still being written"),
        ],
    )
    def test_the_message_says_what_the_file_looks_like(
        self, tmp_path: Path, content: bytes, error: type[CheckpointError], look: str
    ) -> None:
        path = tmp_path / "pytorch_model.bin"
        path.write_bytes(content)
        with pytest.raises(error, match=look) as caught:
            open_torch_file(path)
        assert str(path) in str(caught.value)

    def test_a_missing_file_is_incomplete_and_a_directory_is_corrupt(self, tmp_path: Path) -> None:
        with pytest.raises(IncompleteCheckpointError, match="missing"):
            open_torch_file(tmp_path / "none.pt")
        with pytest.raises(CorruptFileError, match="directory"):
            open_torch_file(tmp_path)

    def test_the_tar_format_is_named(self, tmp_path: Path) -> None:
        with tarfile.open(tmp_path / "old.tar", "w") as tar:
            tar.addfile(tarfile.TarInfo("storages"))
        with pytest.raises(UnsupportedCheckpointError, match="tar"):
            open_torch_file(tmp_path / "old.tar")


@pytest.mark.parametrize("new_format", [True, False])
def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path, new_format: bool) -> None:
    whole = tmp_path / "whole.pt"
    torch.save({"a": torch.arange(100.0), "b": torch.ones(3)}, whole, _use_new_zipfile_serialization=new_format)
    data = whole.read_bytes()
    cut = tmp_path / "cut.pt"
    for length in {*range(0, 200), *range(0, len(data), 7), *range(len(data) - 120, len(data))}:
        cut.write_bytes(data[:length])
        with pytest.raises((IncompleteCheckpointError, CorruptFileError)):
            open_torch_file(cut)
    cut.write_bytes(data[: len(data) - 30])
    with pytest.raises(IncompleteCheckpointError, match="truncated or still being written"):
        open_torch_file(cut)


@pytest.mark.parametrize("new_format", [True, False])
def test_a_file_whose_tail_is_not_written_yet_is_refused(tmp_path: Path, new_format: bool) -> None:
    path = tmp_path / "tail.pt"
    torch.save({"a": torch.ones(4000)}, path, _use_new_zipfile_serialization=new_format)
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(150)
        file.truncate(size)
    with pytest.raises(CheckpointError):
        open_torch_file(path)


class TestLazyTensor:
    storage = LazyStorage("f", "0", "float32", "cpu", 0, 80, None)

    @pytest.mark.parametrize(
        ("offset", "shape", "strides"),
        [
            (0, (21,), (1,)),
            (1, (20,), (1,)),
            (0, (4, 5), (6, 1)),
            (-1, (2,), (1,)),
            (0, (-1,), (1,)),
            (0, (2,), (-1,)),
            (0, (2, 2), (1,)),
            (0, (2**40, 2**40), (0, 0)),
            (0, (True,), (1,)),
            (0, (1,) * 65, (1,) * 65),
        ],
    )
    def test_a_window_outside_its_storage_is_refused(
        self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        with pytest.raises(CorruptFileError):
            LazyTensor(self.storage, "float32", offset, shape, strides)

    def test_the_whole_storage_fits(self) -> None:
        tensor = LazyTensor(self.storage, "float32", 0, (4, 5), (5, 1))
        assert (tensor.numel, tensor.nbytes, tensor.extent_bytes, tensor.is_contiguous) == (20, 80, 80, True)

    def test_an_empty_tensor_fits_anywhere(self) -> None:
        assert LazyTensor(self.storage, "float32", 30, (0, 9), (9, 1)).extent_bytes == 0


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


def test_reading_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, ckptflow.torchfiles; sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("change", [4, -4, 8, -8, 64])
def test_a_header_that_moves_its_data_is_refused(tmp_path: Path, change: int) -> None:
    """The length of the padding before a storage stands in its header alone, which no checksum covers."""
    path = tmp_path / "t.pt"
    torch.save({"a": torch.randn(40), "b": torch.randn(40), "c": torch.randn(40)}, path)
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo("t/data/1").header_offset + 28
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[at : at + 2], "little") + change
    data[at : at + 2] = max(length, 0).to_bytes(2, "little")
    path.write_bytes(data)
    with pytest.raises(CorruptFileError, match="zip"):
        open_torch_file(path)
