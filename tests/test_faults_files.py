"""Reported faults of single files: hostile ones, and damage that their formats don't show."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fuzz_seeds
from ckptflow.convert import convert
from ckptflow.convert import plan_conversion as plan
from ckptflow.errors import CorruptFileError, UnsafeFileError
from ckptflow.formats.registry import check, locate
from ckptflow.request import ConvertRequest
from ckptflow.validate.verify import VerifyOptions, verify
from faults import age, converted, refused, same
from rank_writer import rank_name
from validation import flip_bit


class Command:
    """Runs when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.file), "w")


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "m.ckpt",
        "m.pt",
        "pytorch_model_fsdp.bin",
        rank_name(1, 0),
        "t/mp_rank_00_model_states.pt",
        "mp_rank_00/model_optim_rng.pt",
        ".metadata",
    ],
)
def test_b82_l5_code_in_any_file_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    path, made = tmp_path / "c" / name, tmp_path / "made"
    path.parent.mkdir(parents=True)
    value = {"state_dict": {"w": torch.ones(2)}, "module": {"w": torch.ones(2)}, "x": Command(made)}
    if name == ".metadata":
        import pickle

        path.write_bytes(pickle.dumps(value["x"]))
        (tmp_path / "c" / "__0_0.distcp").write_bytes(b"x")
    else:
        torch.save(value, path)
    target = path if name in ("m.ckpt", "m.pt") else tmp_path / "c"
    with pytest.raises(UnsafeFileError, match="open"):
        convert(ConvertRequest(path=target, out=tmp_path / "out"))
    assert not made.exists()
    assert check(locate(target)).state == "incomplete"


def test_b84_a_namespace_beside_the_weights_is_data(tmp_path: Path) -> None:
    state = {"a.weight": torch.randn(3), "b.weight": torch.randn(2)}
    torch.save({"args": argparse.Namespace(x=1), "model": state}, tmp_path / "c.pt")
    found, record = converted(tmp_path / "c.pt", tmp_path / "out")
    assert same(found, state)
    assert [entry["name"] for entry in record["left_out"]] == ["args"]


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a\0b"])
def test_names_that_no_file_system_takes_are_refused(tmp_path: Path, name: str) -> None:
    fuzz_seeds.hf_safetensors(tmp_path)
    index = {"weight_map": {"a": name, "b": "model-00001-of-00004.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(tmp_path, tmp_path / "out")
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    fuzz_seeds.zero_2(tmp_path)
    (tmp_path / "latest").write_text(name)
    refused(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("layout", ["fsdp", "torch_dcp", "zero_2", "lightning", "hf_bin", "megatron_legacy_checkpoint"])
def test_l1_a_flipped_byte_of_a_torch_file_is_refused_and_found_by_verification(tmp_path: Path, layout: str) -> None:
    (tmp_path / "c").mkdir()
    seed = fuzz_seeds.SEEDS[layout](tmp_path / "c")
    options = {k: tmp_path / "c" / v if k == "config_dir" else v for k, v in seed.options.items()}
    path = tmp_path / "c" / seed.path
    converted(path, tmp_path / "before", **options)
    tensor = plan(ConvertRequest(path=path, out=tmp_path / "out", **options)).plan.tensors[0]
    piece = tensor.source.pieces[0]
    flip_bit(Path(piece.file.path), piece.offset_bytes)

    error = refused(path, tmp_path / "out", **options)
    assert isinstance(error, CorruptFileError)
    assert error.file == piece.file.path
    assert tensor.fqn in str(error.tensor)

    report = verify(tmp_path / "before", against=path, options=VerifyOptions(config_dir=options.get("config_dir")))
    found = {c.name: c.detail for c in report.checks if c.status == "failed"}
    if layout == "hf_bin":  # a model of its own now, that OUT is compared with
        assert tensor.fqn in found["values"]
    else:
        assert Path(piece.file.path).name in found["checksums in the source"]


@pytest.mark.parametrize("layout", ["fsdp", "torch_dcp", "hf_bin", "zero_3"])
def test_l1_an_undamaged_source_passes(tmp_path: Path, layout: str) -> None:
    (tmp_path / "c").mkdir()
    path = tmp_path / "c" / fuzz_seeds.SEEDS[layout](tmp_path / "c").path
    converted(path, tmp_path / "out")
    report = verify(tmp_path / "out", against=path)
    (found,) = (c for c in report.checks if c.name == "checksums in the source")
    assert (found.status, found.figures["storages"]) != ("passed", 0)
    assert found.status == "passed"


@pytest.mark.parametrize("kind", ["safetensors", "legacy torch"])
def test_l2_a_file_that_ends_in_zeros_is_said_to_and_not_complete_while_it_is_young(tmp_path: Path, kind: str) -> None:
    state = {"a.weight": torch.randn(64, 64), "b.weight": torch.randn(64, 64)}
    path = tmp_path / ("model.safetensors" if kind == "safetensors" else "pytorch_model.bin")
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=False)
    assert check(locate(tmp_path)).state == "complete"
    with open(path, "r+b") as file:
        file.seek(-10_000, os.SEEK_END)
        file.write(bytes(10_000))
    assert check(locate(tmp_path)).state == "in-progress"
    age(tmp_path)
    assert check(locate(tmp_path)).state == "complete"
    _, record = converted(tmp_path, tmp_path / "out")
    assert any("ends in 8192 zero bytes" in note for note in record["notes"])


def test_l2_a_preallocated_torch_zip_is_refused(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.randn(64, 64)}, tmp_path / "pytorch_model.bin")
    with open(tmp_path / "pytorch_model.bin", "r+b") as file:
        file.seek(-10_000, os.SEEK_END)
        file.write(bytes(10_000))
    refused(tmp_path, tmp_path / "out")


def test_l4_nothing_of_ours_loads_through_dcp_whose_errors_are_no_exceptions() -> None:
    import ckptflow

    assert ckptflow.__file__ is not None
    for path in Path(ckptflow.__file__).parent.rglob("*.py"):
        assert "import torch.distributed.checkpoint" not in path.read_text(), path
        assert "from torch.distributed.checkpoint" not in path.read_text(), path
