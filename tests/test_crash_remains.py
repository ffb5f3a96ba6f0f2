"""What a crash of the machine leaves beside and in weight files: empty files, zeros, holes, files that were cut off."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptflow.formats.registry import check, locate
from faults import age, converted, refused
from trainer_steps import hf_step
from validation import CONFIG

SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "vocab.txt")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, "empty") for name in SIDE_FILES),
        *((name, "zeros") for name in SIDE_FILES),
        *((name, "cut") for name in SIDE_FILES if name.endswith(".json")),  # of others nothing tells
    ],
)
def test_a_side_file_that_a_crash_left_goes_into_no_model(tmp_path: Path, name: str, damage: str) -> None:
    path = hf_step(tmp_path / "step")
    (path / "config.json").write_text(json.dumps(CONFIG))
    content = (
        b"\n".join(b"word" for _ in range(2000)) if name == "vocab.txt" else json.dumps({"a": "b" * 8000}).encode()
    )
    left = {"empty": b"", "zeros": content[:4096] + bytes(len(content) - 4096), "cut": content[:4096]}[damage]
    (path / name).write_bytes(left)
    error = refused(path, tmp_path / "out")
    assert str(error.file) == str(path / name)
    assert check(locate(path)).state != "complete"
    assert name in check(locate(path)).reason


def test_a_tokenizer_beside_an_adapter_is_looked_at_too(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    save_file({"base_model.model.q.lora_A.weight": torch.ones(2, 3)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert check(locate(tmp_path)).state == "complete"
    (tmp_path / "tokenizer.json").write_bytes(bytes(100))
    assert check(locate(tmp_path)).state != "complete"


def test_nothing_but_zeros_is_called_so(tmp_path: Path) -> None:
    path = hf_step(tmp_path / "step")
    index, weights = path / "model.safetensors.index.json", path / "model-00001-of-00002.safetensors"
    for file in (path / "config.json", index, weights):
        kept = file.read_bytes()
        file.write_bytes(bytes(len(kept)))
        assert "its space was reserved and never written" in refused(path, tmp_path / "out").what
        file.write_bytes(kept)


def test_holes_are_told_and_not_complete_while_they_are_young(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.randn(1024, 1024), "b.weight": torch.randn(64, 64)}, path)
    data = path.read_bytes()
    with open(path, "wb") as file:
        file.write(data[: 2**20])
        file.seek(2 * 2**20)
        file.write(data[2 * 2**20 :])
    if os.stat(path).st_blocks * 512 >= len(data):
        pytest.skip("a file system without holes")
    assert check(locate(tmp_path)).state == "in-progress"
    age(tmp_path)
    assert check(locate(tmp_path)).state == "complete"
    _, record = converted(tmp_path, tmp_path / "out")
    assert any("has holes of 1048576 bytes" in note for note in record["notes"])


def test_a_trainer_state_without_content_is_not_there_yet(tmp_path: Path) -> None:
    path = hf_step(tmp_path / "checkpoint-5")
    (path / "training_args.bin").write_bytes(b"x")
    (path / "trainer_state.json").write_text("")
    age(path)
    assert check(locate(path)).state == "in-progress"
    (path / "trainer_state.json").write_text("{}")
    assert check(locate(path)).state == "complete"
