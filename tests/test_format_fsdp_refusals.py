"""FSDP rank files that contradict each other, or whose values can't be merged, are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from ckptflow.errors import (
    InconsistentCheckpointError,
    UnsupportedCheckpointError,
)
from rank_writer import from_local, mesh_of, rank_name, save_ranks, sharded, sharded_pair
from reading import manifest_of


def test_unreduced_tensors_are_refused(tmp_path: Path) -> None:
    save_ranks(tmp_path, 2, lambda rank: {"w": from_local(torch.ones(3), torch.ones(3), mesh_of([2]), [Partial()])})
    with pytest.raises(UnsupportedCheckpointError, match="never reduced"):
        manifest_of(tmp_path)


def test_a_part_of_another_size_than_its_placement_says_is_refused(tmp_path: Path) -> None:
    full = torch.zeros(8, 2)

    def state(rank: int) -> dict[str, Any]:
        return {"w": from_local(torch.zeros(4 + rank, 2), full, mesh_of([2]), [Shard(0)])}

    save_ranks(tmp_path, 2, state)
    with pytest.raises(InconsistentCheckpointError, match="another shape") as error:
        manifest_of(tmp_path)
    assert error.value.file is not None
    assert error.value.file.endswith(rank_name(2, 1))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"shape": (6, 2)}, "shape"),
        ({"dtype": torch.bfloat16}, "dtype"),
        ({"mesh": (2, 1), "placements": [Shard(0), Replicate()]}, "device mesh"),
        ({"placements": [Shard(1)]}, "placements"),
        ({"more": {"buffer": torch.zeros(2)}}, "missing in some rank files"),
    ],
    ids=str,
)
def test_ranks_of_different_saves_are_refused(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(InconsistentCheckpointError, match=word):
        manifest_of(sharded_pair(tmp_path, **changes))


def test_a_sharded_tensor_that_a_rank_lacks_is_refused(tmp_path: Path) -> None:
    full = torch.zeros(4, 2)
    names = [("a", "b"), ("a",)]
    save_ranks(tmp_path, 2, lambda rank: {name: sharded(full, mesh_of([2]), [Shard(0)]) for name in names[rank]})
    with pytest.raises(InconsistentCheckpointError, match="missing in a rank's file") as error:
        manifest_of(tmp_path)
    assert error.value.tensor == "b"


def test_replicas_that_differ_are_refused(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        full = torch.arange(8.0) + (rank // 2)
        return {"w": sharded(full, mesh_of([2, 2]), [Replicate(), Shard(0)])}

    save_ranks(tmp_path, 4, state)
    with pytest.raises(InconsistentCheckpointError, match="equal copies"):
        manifest_of(tmp_path)


def test_names_that_speak_of_more_ranks_than_the_mesh_are_refused_with_the_reason(tmp_path: Path) -> None:
    sharded_pair(tmp_path)
    for rank in range(2):
        (tmp_path / rank_name(2, rank)).rename(tmp_path / rank_name(4, rank))
    with pytest.raises(InconsistentCheckpointError, match="more ranks"):
        manifest_of(tmp_path)


def test_names_that_speak_of_fewer_ranks_than_the_mesh_are_refused(tmp_path: Path) -> None:
    full = torch.zeros(8, 2)
    save_ranks(tmp_path, 4, lambda rank: {"w": sharded(full, mesh_of([4]), [Shard(0)])}, named=False)
    for rank in range(4):
        old = tmp_path / rank_name(4, rank)
        old.rename(tmp_path / rank_name(2, rank)) if rank < 2 else old.unlink()
    with pytest.raises(InconsistentCheckpointError, match="other ranks than there are files for"):
        manifest_of(tmp_path)


class Packed(torch.Tensor):
    """A tensor whose values are computed from others, as quantized weights are."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Packed, (torch.ones(2),)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["sparse", "quantized", "nested", "Packed"])
def test_a_tensor_without_plain_values_is_refused_and_not_left_out(tmp_path: Path, kind: str) -> None:
    eye = torch.eye(3)
    tensors: dict[str, Callable[[], torch.Tensor]] = {
        "sparse": eye.to_sparse,
        "quantized": lambda: torch.quantize_per_tensor(eye, 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([eye[0], eye[1, :2]]),
        "Packed": lambda: eye.as_subclass(Packed),
    }
    save_ranks(tmp_path, 1, lambda rank: {"w": eye, "odd": tensors[kind]()})
    with pytest.raises(UnsupportedCheckpointError, match="bytes of a tensor") as refused:
        manifest_of(tmp_path)
    assert (refused.value.tensor, kind in str(refused.value.found)) == ("odd", True)


def test_ranks_whose_schedules_counted_other_steps_are_refused(tmp_path: Path) -> None:
    sharded_pair(tmp_path)
    for rank in range(2):
        state = {"lr_scheduler": {"last_epoch": 10}, "rng": {"cpu": torch.arange(9, dtype=torch.uint8)}}
        torch.save(state, tmp_path / f"extra_state_world_size_2_rank_{rank}.pt")
    assert manifest_of(tmp_path).world_size == 2
    torch.save({"lr_scheduler": {"last_epoch": 5}}, tmp_path / "extra_state_world_size_2_rank_1.pt")
    with pytest.raises(InconsistentCheckpointError, match="different steps") as refused:
        manifest_of(tmp_path)
    assert refused.value.found == 5
