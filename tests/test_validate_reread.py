"""The second readers of sharded checkpoints put tensors together right, and notice files that don't belong together."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist

from ckptflow.convert import convert
from ckptflow.errors import HelperError, InconsistentCheckpointError, UnsupportedCheckpointError
from ckptflow.request import ConvertRequest
from ckptflow.validate.reread import fsdp
from ckptflow.validate.reread.dcp import DcpRereader
from ckptflow.validate.reread.dcp_hf import DcpHuggingFaceRereader
from ckptflow.validate.reread.fsdp import FsdpRereader
from ckptflow.validate.reread.torch_file import TorchFileRereader
from ckptflow.validate.reread.torch_stubs import load_rank_file
from ckptflow.validate.verify import VerifyOptions, verify
from dcp_hf_writer import write_rank
from validation import read_whole


@contextmanager
def rank_of(world_size: int, rank: int) -> Iterator[None]:
    """A process group in which this process is one rank and nobody else is there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def write_ranks(
    directory: Path, mesh_shape: tuple[int, ...], tensors: Mapping[str, tuple[torch.Tensor, Sequence[object]]]
) -> list[Path]:
    """Rank files of DTensors as torch itself shards and pickles them.

    Args:
        directory: where to.
        mesh_shape: ranks along each mesh dim.
        tensors: name → (full tensor, placements).
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    world_size = int(torch.tensor(mesh_shape).prod())
    paths = []
    for rank in range(world_size):
        with rank_of(world_size, rank):
            mesh = init_device_mesh("cpu", mesh_shape)
            state = {}
            for name, (full, placements) in tensors.items():
                replicated = DTensor.from_local(full, mesh, run_check=False)
                state[name] = replicated.redistribute(mesh, placements)
            paths.append(directory / f"model_world_size_{world_size}_rank_{rank}.pt")
            torch.save({**state, "buffer": torch.arange(3.0)}, paths[-1])
    return paths


MATRIX = torch.randn(12, 10, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """torch logs a line for every mesh that it unpickles."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("mesh_shape", "names"),
    [
        ((3,), ("Shard(0)",)),
        ((3,), ("Shard(1)",)),
        ((5,), ("Shard(0)",)),
        ((16,), ("Shard(0)",)),
        ((3,), ("Replicate()",)),
        ((2, 2), ("Replicate()", "Shard(1)")),
        ((2, 3), ("Shard(0)", "Shard(1)")),
        ((2, 2), ("Shard(0)", "Shard(0)")),
        ((2, 2, 2), ("Shard(1)", "Replicate()", "Shard(0)")),
    ],
    ids=str,
)
def test_dtensors_of_any_mesh_are_put_together(
    tmp_path: Path, mesh_shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    from torch.distributed.tensor import Replicate, Shard

    placements = [{"Replicate()": Replicate(), "Shard(0)": Shard(0), "Shard(1)": Shard(1)}[name] for name in names]
    reader = FsdpRereader(write_ranks(tmp_path, mesh_shape, {"w": (MATRIX, placements)}))
    assert torch.equal(read_whole(reader, "w"), MATRIX)
    assert torch.equal(read_whole(reader, "buffer"), torch.arange(3.0))
    assert reader.shape("other") is None


def test_swapped_rank_files_are_found_by_the_mesh_that_they_hold(tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard

    first, second = write_ranks(tmp_path, (2,), {"w": (MATRIX, [Shard(0)])})
    aside = first.rename(tmp_path / "aside")
    second.rename(first)
    aside.rename(second)
    with pytest.raises(InconsistentCheckpointError, match="saved by another rank than its name says"):
        FsdpRereader([first, second])


def test_a_rank_of_another_shape_is_found(tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard

    (tmp_path / "other").mkdir()
    first, _ = write_ranks(tmp_path, (2,), {"w": (MATRIX, [Shard(0)])})
    _, second = write_ranks(tmp_path / "other", (2,), {"w": (MATRIX[:9], [Shard(0)])})
    with pytest.raises(InconsistentCheckpointError):
        FsdpRereader([first, second]).read("w", (0, 0), (12, 10))


def test_a_missing_rank_leaves_a_gap(tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard

    first, _ = write_ranks(tmp_path, (2,), {"w": (MATRIX, [Shard(0)])})
    with pytest.raises(InconsistentCheckpointError, match="leave a gap"):
        FsdpRereader([first]).read("w", (0, 0), (12, 10))


def test_partial_sums_are_refused(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    with rank_of(1, 0):
        mesh = init_device_mesh("cpu", (1,))
        state = {"w": DTensor.from_local(MATRIX, mesh, [Partial()], run_check=False)}
        torch.save(state, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(UnsupportedCheckpointError, match="partial sums"):
        FsdpRereader([tmp_path / "model_world_size_1_rank_0.pt"])


def test_loading_a_rank_file_leaves_torchs_own_allow_list_as_it_was(tmp_path: Path) -> None:
    from torch.distributed.tensor import DTensor, Shard

    (path,) = write_ranks(tmp_path, (1,), {"w": (MATRIX, [Shard(0)])})
    load_rank_file(path)
    assert isinstance(torch.load(path, weights_only=True)["w"], DTensor)


class Opener:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.path), "w")


def test_code_in_a_rank_file_is_not_run(tmp_path: Path) -> None:
    torch.save({"w": Opener(tmp_path / "pwned")}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(RuntimeError, match="Weights only load failed"):
        FsdpRereader([tmp_path / "model_world_size_1_rank_0.pt"])
    assert not (tmp_path / "pwned").exists()


def test_more_files_than_batches_keep_their_ranks(tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard

    files = write_ranks(tmp_path, (12,), {"w": (MATRIX, [Shard(0)]), "t": (MATRIX.T, [Shard(1)])})
    reader = FsdpRereader(files[::-1])
    assert torch.equal(read_whole(reader, "w"), MATRIX)
    assert torch.equal(read_whole(reader, "t"), MATRIX.T)


def test_a_process_that_dies_is_no_reason_to_go_without_a_second_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.tensor import Shard

    files = write_ranks(tmp_path, (2,), {"w": (MATRIX, [Shard(0)])})
    convert(ConvertRequest(path=tmp_path, out=tmp_path / "out"))
    monkeypatch.setattr(fsdp, "_PROCESS", "ckptflow.validate.no_such_module")
    with pytest.raises(HelperError, match="the process in which torch loads rank files died") as caught:
        verify(tmp_path / "out", against=tmp_path)
    assert str(files[0]) in str(caught.value)
    assert "no_such_module" in str(caught.value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_entries_are_put_at_their_offsets(tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    state = {"model": {"w": MATRIX, "b": torch.arange(5.0)}, "optim": {"w": MATRIX * 2, "step": 3}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    files = {path.name: path for path in tmp_path.iterdir()}
    reader = DcpRereader(tmp_path, files)
    assert torch.equal(read_whole(reader, "w"), MATRIX)
    assert torch.equal(read_whole(reader, "b"), torch.arange(5.0))
    assert reader.shape("step") is None


def test_slices_in_safetensors_files_are_put_at_their_saved_offsets(tmp_path: Path) -> None:
    for rank, rows in enumerate(MATRIX.split(5), start=1):
        write_rank(
            tmp_path / "c", rank, w=([5 * (rank - 1), 0], rows), **({} if rank > 1 else {"b": ([0], MATRIX[0].clone())})
        )
    files = sorted((tmp_path / "c").iterdir())
    reader = DcpHuggingFaceRereader(files)
    assert torch.equal(read_whole(reader, "w"), MATRIX)
    assert torch.equal(read_whole(reader, "b"), MATRIX[0])
    assert reader.shape("other") is None
    with pytest.raises(InconsistentCheckpointError, match="leave a gap"):
        DcpHuggingFaceRereader([files[0], files[2]]).read("w", (0, 0), (12, 10))


def test_a_conversion_of_slices_is_compared_through_the_second_reader(fixtures_dir: Path, tmp_path: Path) -> None:
    fixture = fixtures_dir / "dcp_hf_storage_w2_sharded"
    source, config_dir = fixture / "input/checkpoint-10", fixture / "hf_config"
    convert(ConvertRequest(path=source, out=tmp_path / "out", config_dir=config_dir))
    report = verify(tmp_path / "out", against=source, options=VerifyOptions(config_dir=config_dir))
    assert report.passed, report.failures
    assert report.checks[-1].figures["source read through"] == DcpHuggingFaceRereader.how


FSDP = [
    "fsdp1_hsdp_2x2_llama",
    "fsdp1_shardedtensor_w2_llama",
    "fsdp1_torch24_w2_dtensor",
    "fsdp1_torch24_w2_shardedtensor",
    "fsdp1_w4_qwen2_uneven",
    "fsdp2_torch24_w2_cuda_tags",
    "fsdp2_tp_2x2_llama",
    "fsdp2_w2_deepseekv3_buffer",
    "fsdp2_w3_qwen2_mixed_dims",
    "fsdp2_w4_llama_empty_shards",
]


@pytest.mark.parametrize("name", FSDP)
def test_real_rank_files_equal_the_model_before_it_was_sharded(fixtures_dir: Path, name: str) -> None:
    files = sorted((fixtures_dir / name / "input").rglob("model_world_size_*.pt"))
    reader = FsdpRereader(files)
    for fqn, wanted in load_file(fixtures_dir / name / "expected.safetensors").items():
        offsets = (0,) * wanted.dim()
        assert torch.equal(reader.read(fqn, offsets, tuple(wanted.shape)), wanted), fqn


@pytest.mark.parametrize("name", ["dcp_fsdp_tp_2x2", "dcp_torch24_w2_model_optim", "acc-fsdp2-sharded-w2-bf16mp"])
def test_real_dcp_directories_equal_the_model_before_it_was_sharded(fixtures_dir: Path, name: str) -> None:
    found = sorted(p.parent for p in (fixtures_dir / name / "input").rglob(".metadata"))
    (directory,) = (path for path in found if "optimizer" not in path.name)
    reader = DcpRereader(directory, {p.name: p for p in directory.iterdir()})
    for fqn, wanted in load_file(fixtures_dir / name / "expected.safetensors").items():
        offsets = (0,) * wanted.dim()
        assert torch.equal(reader.read(fqn, offsets, tuple(wanted.shape)), wanted), fqn


def test_a_conversion_of_rank_files_is_compared_through_the_second_reader(tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard

    source = tmp_path / "actor"
    source.mkdir()
    write_ranks(source, (2, 2), {"w": (MATRIX, [Shard(0), Shard(1)]), "v": (MATRIX * 3, [Shard(1), Shard(1)])})
    convert(ConvertRequest(path=source, out=tmp_path / "out"))
    report = verify(tmp_path / "out", against=source)
    assert report.passed, report.failures
    values = report.checks[-1]
    assert (values.name, report.tensors_compared, report.differing_elements) == ("values", 3, 0)
    assert values.figures["source read through"] == FsdpRereader.how


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("lightning-ckpt", "input/checkpoints/epoch=0-step=4.ckpt"),
        ("acc-fsdp1-full-w2", "input/pytorch_model_fsdp.bin"),
    ],
)
def test_single_files_are_compared_through_torch(fixtures_dir: Path, name: str, path: str, tmp_path: Path) -> None:
    source, config_dir = fixtures_dir / name / path, fixtures_dir / name / "input"
    convert(ConvertRequest(path=source, out=tmp_path / "out", config_dir=config_dir))
    report = verify(tmp_path / "out", against=source)
    assert report.passed, report.failures
    assert report.checks[-1].figures["source read through"] == TorchFileRereader.how


def test_of_two_copies_in_one_file_the_one_that_was_converted_is_compared(tmp_path: Path) -> None:
    state = {"model": {"w": MATRIX, "b": MATRIX[0]}, "ema": {"w": MATRIX * 2, "b": MATRIX[1]}, "rng": torch.zeros(3)}
    torch.save(state, tmp_path / "step.pt")
    reader = TorchFileRereader(tmp_path / "step.pt")
    assert torch.equal(read_whole(reader, "w"), MATRIX)
    assert torch.equal(read_whole(reader, "b"), MATRIX[0])
