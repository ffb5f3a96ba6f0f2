"""The zip format of torch files: where its records are, and zips that are damaged, odd or something else."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from ckptflow.errors import CorruptFileError, UnsafeFileError, UnsupportedCheckpointError
from ckptflow.torchfiles import open_torch_file
from torch_values import assert_same, quiet_torch

torch = pytest.importorskip("torch")

pytestmark = quiet_torch


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
