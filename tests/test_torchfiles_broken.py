"""Files that are no torch file, or only a part of one, are refused by what they look like."""

from __future__ import annotations

import os
import pickle
import tarfile
from pathlib import Path

import pytest

from ckptflow.errors import CheckpointError, CorruptFileError, IncompleteCheckpointError, UnsupportedCheckpointError
from ckptflow.torchfiles import open_torch_file
from torch_values import quiet_torch

torch = pytest.importorskip("torch")

pytestmark = quiet_torch


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
