"""Checkpoints of other code bases' models in several layouts, and their conversion."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, Shard

from ckptflow.convert import convert
from ckptflow.request import ConvertRequest
from code_base_models import Tensors, as_torchtitan, config_of, saved_model
from rank_writer import mesh_of, save_ranks, sharded


def as_file(weights: Tensors, directory: Path) -> Path:
    directory.mkdir(parents=True)
    torch.save({"model": weights}, directory / "lit_model.pth")
    return directory / "lit_model.pth"


def as_dcp(weights: Tensors, directory: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {**weights, "train_state": {"step": torch.tensor(3)}}, checkpoint_id=directory / "step-3", no_dist=True
        )
    return directory / "step-3"


def as_nested_dcp(weights: Tensors, directory: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights, "epochs_run": 1}, checkpoint_id=directory / "epoch_1", no_dist=True)
    return directory / "epoch_1"


def as_safetensors(weights: Tensors, directory: Path) -> Path:
    directory.mkdir(parents=True)
    save_file(weights, directory / "model.safetensors")
    return directory


def as_lightning(weights: Tensors, directory: Path) -> Path:
    directory.mkdir(parents=True)
    state = {f"net.{name}": value for name, value in weights.items()} | {"criterion.weight": torch.ones(3)}
    torch.save({"state_dict": state, "pytorch-lightning_version": "2.5.0", "epoch": 1}, directory / "last.ckpt")
    return directory / "last.ckpt"


def as_ranks(weights: Tensors, directory: Path) -> Path:
    """Three ranks, which cut heads anywhere, and matrices along either dim."""

    def part(value: torch.Tensor) -> DTensor:
        return sharded(value, mesh_of((3,)), [Shard(1 if value.ndim > 1 and value.shape[0] % 2 == 0 else 0)])

    return save_ranks(directory, 3, lambda _: {name: part(value) for name, value in weights.items()})


def as_ranks_by_rows(weights: Tensors, directory: Path) -> Path:
    return save_ranks(
        directory, 3, lambda _: {name: sharded(value, mesh_of((3,)), [Shard(0)]) for name, value in weights.items()}
    )


def as_wrapped_ranks(weights: Tensors, directory: Path) -> Path:
    return as_ranks({f"model.{name}": value for name, value in weights.items()}, directory)


def run(source: Path, tmp_path: Path, out: str = "out") -> dict[str, Any]:
    """Convert beside the config that ``saved_model`` left."""
    request = ConvertRequest(path=source, out=tmp_path / out, config_dir=tmp_path / "config", dtype="float32")
    return dict(convert(request))


def assert_same(out: Path, wanted: Tensors) -> None:
    found = load_file(out / "model.safetensors")
    assert set(found) == set(wanted)
    for fqn, value in wanted.items():
        assert torch.equal(found[fqn], value), fqn


def llama(tmp_path: Path, **changes: Any) -> tuple[Tensors, Tensors]:
    """What transformers saves, and the same in torchtitan's names."""
    config = config_of("llama", **changes)
    saved = saved_model(config, tmp_path / "config")
    return saved, as_torchtitan(dict(saved), config)
