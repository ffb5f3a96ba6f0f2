"""Reported faults of what comes out: weight files, their index, dtypes, and the files beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fuzz_seeds
from ckptflow.convert import claim, finish
from ckptflow.convert import plan_conversion as plan
from ckptflow.errors import OutputError
from ckptflow.request import ConvertRequest
from faults import converted


def test_b24_a_weight_file_that_nobody_wrote_is_not_published(tmp_path: Path) -> None:
    fuzz_seeds.hf_safetensors(tmp_path)
    conversion = plan(ConvertRequest(path=tmp_path, out=tmp_path / "out"))
    with pytest.raises(OutputError, match="has not been written"), claim(conversion):
        finish(conversion)
    with claim(conversion):
        (conversion.workspace.model / "model.safetensors").write_bytes(b"")
        with pytest.raises(OutputError, match="has not been written"):
            finish(conversion)
        conversion.workspace.discard()
    assert not (tmp_path / "out").exists()


def test_b57_nothing_of_a_sharded_model_stays_behind_a_single_file(tmp_path: Path) -> None:
    fuzz_seeds.hf_safetensors(tmp_path)
    out = tmp_path / "out"
    converted(tmp_path, out, max_shard_bytes=1)
    assert len(list(out.glob("*.safetensors"))) == len(fuzz_seeds.SHAPES)
    converted(tmp_path, out, overwrite=True)
    assert sorted(p.name for p in out.iterdir()) == ["ckptflow.json", "config.json", "model.safetensors"]


def test_b52_config_and_index_follow_the_cast(tmp_path: Path) -> None:
    fuzz_seeds.hf_safetensors(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "other", "torch_dtype": "bfloat16"}))
    found, _ = converted(tmp_path, tmp_path / "out", dtype="bfloat16", max_shard_bytes=32)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    converted(tmp_path, tmp_path / "out32", dtype="float32")
    config = json.loads((tmp_path / "out32" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "float32"


def test_b55_tokenizer_files_are_the_source_s_own_byte_for_byte(tmp_path: Path) -> None:
    fuzz_seeds.hf_safetensors(tmp_path)
    side = {
        "special_tokens_map.json": '{"eos_token": {"content": "<|im_end|>", "lstrip": false}}',
        "tokenizer_config.json": '{"eos_token": "<|im_end|>", "chat_template": "x"}',
        "tokenizer.json": '{"version":  "1.0"}',
        "chat_template.jinja": "{{ messages }}\n",
        "generation_config.json": '{"eos_token_id": [1, 2]}',
    }
    for name, text in side.items():
        (tmp_path / name).write_text(text)
    config = {"model_type": "other", "dtype": "bfloat16", "eos_token_id": 2, "unknown_field": [1.5, None]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    converted(tmp_path, tmp_path / "out", dtype="bfloat16")
    assert {name: (tmp_path / "out" / name).read_text() for name in side} == side
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


def test_b60_an_invalid_generation_config_stops_nothing_and_is_said(tmp_path: Path) -> None:
    fuzz_seeds.hf_safetensors(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.5}')
    _, record = converted(tmp_path, tmp_path / "out")
    assert any("temperature" in note for note in record["notes"])
