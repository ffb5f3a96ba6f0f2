"""safetensors headers: what the library writes is read, and what contradicts itself is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptflow.errors import (
    CkptflowError,
    CorruptFileError,
    IncompleteCheckpointError,
    UnsafeFileError,
    UnsupportedCheckpointError,
)
from ckptflow.formats.safetensors_header import SafetensorsFile, read_safetensors
from reading import as_numpy, assert_same_bits


def header_of(path: Path) -> SafetensorsFile:
    return read_safetensors(path, path.parent)


def write(path: Path, header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(begin: int, end: int, dtype: str = "U8", shape: list[Any] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_files_of_the_library_come_back_bit_for_bit(tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool)
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = header_of(tmp_path / "model.safetensors")
    assert_same_bits(found.tensors, as_numpy(tensors))
    assert found.metadata == {"format": "pt"}


@pytest.mark.parametrize("kept", [0, 5, 8, 40, -1])
def test_a_file_cut_anywhere_is_incomplete(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(IncompleteCheckpointError):
        header_of(path)


@pytest.mark.parametrize(
    ("header", "data", "kind"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), CorruptFileError),
        ({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12), CorruptFileError),
        ({"a": entry(4, 8)}, bytes(8), CorruptFileError),
        ({"a": entry(0, 8)}, bytes(9), CorruptFileError),
        ({"a": entry(0, 8, shape=[9])}, bytes(8), CorruptFileError),
        ({"a": entry(0, 8, shape=[-8])}, bytes(8), CorruptFileError),
        ({"a": entry(0, 8, shape=[True, 8])}, bytes(8), CorruptFileError),
        ({"a": entry(0, 8, shape=[8.0])}, bytes(8), CorruptFileError),
        ({"a": entry(8, 0, shape=[2**62, 4])}, bytes(8), CorruptFileError),
        ({"a": entry(0, 8, shape=[2**80])}, bytes(8), CorruptFileError),
        ({"a": {**entry(0, 8), "more": 1}}, bytes(8), CorruptFileError),
        ({"a": [0, 8]}, bytes(8), CorruptFileError),
        ({"a": entry(0, 8), "__metadata__": {"n": 1}}, bytes(8), CorruptFileError),
        ({"a": entry(0, 8, dtype="F4")}, bytes(8), UnsupportedCheckpointError),
        (b'{"a": 1, "a": 1}', b"", CorruptFileError),
        (b"[1, 2]", b"", CorruptFileError),
        (b"{not json}", b"", CorruptFileError),
        (b"\xff\xfe{}", b"", CorruptFileError),
        (b'{"a":' * 50_000, b"", CorruptFileError),
        (b'{"a":' + b"9" * 6000 + b"}", b"", CorruptFileError),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(
    tmp_path: Path, header: bytes | dict[str, Any], data: bytes, kind: type[CkptflowError]
) -> None:
    path = write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(kind) as error:
        header_of(path)
    assert error.value.file == str(path)


@pytest.mark.parametrize("length", [2**62, 2**64 - 1, 100_000_001])
def test_an_absurd_header_length_is_refused_without_being_allocated(tmp_path: Path, length: int) -> None:
    with pytest.raises(UnsafeFileError, match="absurd"):
        header_of(write(tmp_path / "model.safetensors", b"{}", length=length))


@pytest.mark.parametrize(
    "text", [b"<!DOCTYPE html><html>", b"version https://git-lfs.github.com/spec/v1", b'{"a": "b"}']
)
def test_text_in_place_of_a_file_is_named_as_such(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(text * 4)
    with pytest.raises(CorruptFileError, match="text"):
        header_of(path)


def test_a_bomb_of_lists_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    bomb = b'{"a":[' + b"[]," * 700_000 + b"[]]}"
    with pytest.raises(UnsafeFileError, match="bomb"):
        header_of(write(tmp_path / "model.safetensors", bomb))


def test_a_link_out_of_the_directory_is_refused_and_one_of_the_hub_cache_is_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"w": torch.ones(3)}, blobs / "1234")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1234")
    assert set(header_of(snapshot / "model.safetensors").tensors) == {"w"}
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").symlink_to("../blobs/1234")
    with pytest.raises(UnsafeFileError, match="out of the checkpoint"):
        header_of(other / "model.safetensors")


def test_a_hundred_thousand_tensors_are_described(tmp_path: Path) -> None:
    header = {f"model.layers.{i}.weight": entry(4 * i, 4 * i + 4, "F32", [1]) for i in range(100_000)}
    path = write(tmp_path / "model.safetensors", header, bytes(400_000))
    assert len(header_of(path).tensors) == 100_000
