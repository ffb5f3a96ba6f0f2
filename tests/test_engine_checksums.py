"""Checksums that source files record are compared while the files are read, however they are read."""

from __future__ import annotations

import threading
import zlib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptflow.engine.checksums import Compared, PassingChecksums, compare_the_rest
from ckptflow.engine.sources import SourceFiles
from ckptflow.errors import CorruptFileError
from ckptflow.tensors import SourceFile
from ckptflow.torchfiles.checksums import ChecksumTable
from ckptflow.torchfiles.zipfiles import ZipRecord
from engine_sources import describe
from validation import flip_bit

Ranges = list[tuple[int, int]]


class OneFile:
    """A file of some storages with gaps between them, and what it records of them."""

    def __init__(self, path: Path, sizes: list[int], gap: int = 7) -> None:
        content = np.random.default_rng(len(sizes)).bytes(sum(sizes) + gap * (len(sizes) + 1))
        path.write_bytes(content)
        records, at = [], gap
        for number, size in enumerate(sizes):
            records.append(ZipRecord(str(number), at, size, zlib.crc32(content[at : at + size])))
            at += size + gap
        self.path, self.records = path, records

    def of(self, file: SourceFile) -> ChecksumTable:
        assert file.path == str(self.path)
        return ChecksumTable(self.records)

    def read(self, ranges: Ranges, threads: int = 1) -> Compared:
        """What one weight file tells after it has read ``ranges``."""
        file, passing = describe(self.path), PassingChecksums(self, ())
        errors: list[BaseException] = []

        def work(first: int) -> None:
            try:
                for begin, end in ranges[first::threads]:
                    sources.read_into(file, begin, memoryview(bytearray(end - begin)))
            except CorruptFileError as error:
                errors.append(error)

        with SourceFiles(passing) as sources:
            workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        if errors:
            raise errors[0]
        return passing.compared()

    def rest(self, *compared: Compared) -> Compared:
        return compare_the_rest(compared, [describe(self.path)], self, (), threads=2)

    def touched(self, ranges: Ranges) -> list[ZipRecord]:
        """Storages that share a byte with one of the ranges."""
        return [r for r in self.records if any(b < r.offset + r.nbytes and r.offset < e for b, e in ranges)]


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    cuts=st.lists(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=12), min_size=1, max_size=3),
    threads=st.integers(1, 3),
    damage=st.none() | st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=150, deadline=None)
def test_every_storage_that_is_read_in_part_or_whole_is_compared(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    cuts: list[list[tuple[float, float]]],
    threads: int,
    damage: float | None,
) -> None:
    path = tmp_path_factory.mktemp("source") / "file"
    one = OneFile(path, sizes)
    length = path.stat().st_size
    files = [[(int(min(pair) * length), int(max(pair) * length)) for pair in ranges] for ranges in cuts]
    files = [[(begin, end) for begin, end in ranges if begin < end] for ranges in files]
    touched = one.touched([r for ranges in files for r in ranges])
    at = None if damage is None else int(damage * length)
    if at is not None:
        flip_bit(path, at)
    is_hit = at is not None and any(r.offset <= at < r.offset + r.nbytes for r in touched)
    with pytest.raises(CorruptFileError) if is_hit else nullcontext():
        found = [Compared.from_json(one.read(ranges, threads).to_json()) for ranges in files]  # type: ignore[arg-type]
        total = one.rest(*found)
        assert total.partly == ()
        if len(files) == 1:
            assert (total.storages, total.nbytes) == (len(touched), sum(r.nbytes for r in touched))


def test_a_storage_that_is_read_whole_is_compared_at_once(tmp_path: Path) -> None:
    one = OneFile(tmp_path / "file", [500, 300])
    assert one.read([(0, 400), (400, 821)]) == Compared(storages=2, nbytes=800)
    flip_bit(tmp_path / "file", 450)
    with pytest.raises(CorruptFileError, match="changed after torch saved") as error:
        one.read([(0, 400), (400, 821)])
    assert error.value.expected == f"crc32 {one.records[0].crc32:08x} in the 500 bytes at 7"


def test_a_storage_that_is_read_in_thousands_of_ranges_is_read_again(tmp_path: Path) -> None:
    one = OneFile(tmp_path / "file", [20_000])
    every_other = [(at, at + 1) for at in range(7, 20_007, 2)]
    found = one.read(every_other)
    assert [part.ranges for part in found.partly] == [None]
    assert one.rest(found) == Compared(storages=1, nbytes=20_000)
    flip_bit(tmp_path / "file", 9_000)
    with pytest.raises(CorruptFileError):
        one.rest(one.read(every_other))


def test_storages_without_a_recorded_checksum_are_let_through(tmp_path: Path) -> None:
    one = OneFile(tmp_path / "file", [500])
    one.records = [ZipRecord("0", 7, 500, None)]
    assert one.rest(one.read([(0, 514)])) == Compared()
