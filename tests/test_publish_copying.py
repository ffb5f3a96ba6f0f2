"""A copy is hashed on both sides: as it was read, and as the disk has it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from ckptflow.errors import TransientPublishError
from ckptflow.publish import copying, upload
from publishing import contents_of, write_model

CHUNK_BYTES, SPAN_BYTES = 1000, 5000


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(copying, "_SPAN_BYTES", SPAN_BYTES)


def copied(source: Path, target: Path, *, read_back: bool = True) -> tuple[str, str | None, list[int]]:
    """Both sums, and what the progress was told."""
    steps: list[int] = []
    with open(source, "rb") as reader, open(target, "w+b") as writer:
        sums = copying.copy_and_hash(reader.fileno(), writer.fileno(), steps.append, read_back=read_back)
    return *sums, steps


@pytest.mark.parametrize(
    "nbytes", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 4 * CHUNK_BYTES, SPAN_BYTES, SPAN_BYTES + 1, 10 * SPAN_BYTES + 7]
)
def test_a_copy_has_the_bytes_and_both_sums(tmp_path: Path, nbytes: int) -> None:
    content = os.urandom(nbytes)
    (tmp_path / "source").write_bytes(content)
    expected = hashlib.sha256(content).hexdigest()
    read, found, steps = copied(tmp_path / "source", tmp_path / "target")
    assert (read, found) == (expected, expected)
    assert (tmp_path / "target").read_bytes() == content
    assert sum(steps) == nbytes
    assert copied(tmp_path / "source", tmp_path / "again", read_back=False)[:2] == (expected, None)


@pytest.mark.parametrize("at", [0, SPAN_BYTES + 1, -1])
def test_a_byte_that_turns_in_the_copy_is_seen_there(tmp_path: Path, at: int) -> None:
    content = os.urandom(3 * SPAN_BYTES + 500)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(content)
    at %= len(content)
    done = 0

    def turn(nbytes: int) -> None:
        nonlocal done
        if done <= at < done + nbytes:
            with open(target, "r+b") as file:
                file.seek(at)
                file.write(bytes([content[at] ^ 1]))
        done += nbytes

    # A span is read back once its last chunk is there, which for byte 0 is four chunks later.
    with open(source, "rb") as reader, open(target, "w+b") as writer:
        read, found = copying.copy_and_hash(reader.fileno(), writer.fileno(), turn, read_back=True)
    assert read == hashlib.sha256(content).hexdigest()
    assert found == hashlib.sha256(target.read_bytes()).hexdigest() != read


def test_a_damaged_copy_gets_no_name(tmp_path: Path) -> None:
    model, place = write_model(tmp_path / "out"), tmp_path / "place"
    turned: list[Path] = []

    def turn(nbytes: int) -> None:
        for path in place.glob(".ckptflow-upload-*"):
            if path.stat().st_size and not turned:
                turned.append(path)
                with open(path, "r+b") as file:
                    first = file.read(1)
                    file.seek(0)
                    file.write(bytes([first[0] ^ 1]))

    with pytest.raises(TransientPublishError, match="the copy is not what was written"):
        upload(model, place.as_uri(), progress=turn)
    assert turned
    assert set(contents_of(place)) <= {"ckptflow.publish.json"}
    upload(model, place.as_uri())
    assert contents_of(place).items() >= contents_of(model).items()
