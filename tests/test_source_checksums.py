"""A conversion compares what torch recorded of each storage, also of those that several weight files are made of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import fuzz_seeds
from ckptflow.convert import claim, convert, write_file
from ckptflow.convert import plan_conversion as plan
from ckptflow.errors import CorruptFileError
from ckptflow.request import ConvertRequest
from ckptflow.torchfiles.zipfiles import read_zip_directory
from faults import converted, refused
from validation import flip_bit

SPREAD: dict[str, Callable[[Path], fuzz_seeds.Seed]] = {
    "zero_2": fuzz_seeds.zero_2,
    "zero_3": fuzz_seeds.zero_3,
}
"""Flat buffers, which hold tensors of several weight files."""


def checksums(record: dict[str, Any]) -> dict[str, int]:
    """How many storages were compared, and their bytes."""
    found: dict[str, int] = record["source"]["checksums"]
    return found


@pytest.fixture(params=SPREAD)
def spread(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint whose storages hold tensors of several weight files."""
    (tmp_path / "c").mkdir()
    return tmp_path / "c" / SPREAD[request.param](tmp_path / "c").path


def test_what_several_weight_files_read_of_a_storage_is_put_together(spread: Path, tmp_path: Path) -> None:
    _, in_one = converted(spread, tmp_path / "one")
    found, in_many = converted(spread, tmp_path / "many", max_shard_bytes=64)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert len(found) > 2
    assert checksums(in_many) == checksums(in_one)
    assert checksums(in_one)["bytes"] >= sum(t.nbytes for t in found.values())


def test_a_bit_is_found_wherever_it_flips_in_such_a_storage(spread: Path, tmp_path: Path) -> None:
    tensors = plan(ConvertRequest(path=spread, out=tmp_path / "out")).plan.tensors
    for tensor in tensors:
        piece = tensor.source.pieces[-1]
        flip_bit(Path(piece.file.path), piece.offset_bytes)
        error = refused(spread, tmp_path / "out", max_shard_bytes=64)
        assert isinstance(error, CorruptFileError)
        assert error.file == piece.file.path
        flip_bit(Path(piece.file.path), piece.offset_bytes)
    convert(ConvertRequest(path=spread, out=tmp_path / "out", max_shard_bytes=64))


def test_what_a_killed_run_read_counts_in_the_next(spread: Path, tmp_path: Path) -> None:
    asked = ConvertRequest(path=spread, out=tmp_path / "out", max_shard_bytes=64)
    with suppress(KeyboardInterrupt), claim(plan(asked)):
        write_file(plan(asked), 0)
        raise KeyboardInterrupt  # leaves what is finished, as a kill does
    again = convert(asked)
    assert again == convert(ConvertRequest(path=spread, out=tmp_path / "whole", max_shard_bytes=64))


def test_a_storage_of_which_a_tensor_uses_little_is_compared_whole(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a.weight": torch.randn(100, 100)[50:51], "b.weight": torch.randn(3, 3)}, path)
    _, record = converted(tmp_path, tmp_path / "out")
    assert checksums(record) == {"storages": 2, "bytes": 40_036}
    with open(path, "rb") as file:
        records = read_zip_directory(file, str(path), offset=0, length=path.stat().st_size).records.values()
    (large,) = (found for found in records if found.nbytes == 40_000)
    flip_bit(path, large.offset + 39_999)
    assert refused(tmp_path, tmp_path / "again").tensor == "a.weight"


def test_a_file_that_records_no_checksums_is_converted_without(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a.weight": torch.randn(30, 30)}, tmp_path / "pytorch_model.bin")
    finally:
        torch.serialization.set_crc32_options(before)
    _, record = converted(tmp_path, tmp_path / "out")
    assert checksums(record) == {"storages": 0, "bytes": 0}
