"""Reported faults of tensors: tied, overlapping, strided, or saved without their values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptflow.errors import InconsistentCheckpointError
from ckptflow.formats.registry import check, locate
from deepspeed_writer import parameters, write_zero2
from faults import age, converted, refused, same, save_dcp
from rank_writer import rank_name

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = {"model_type": "llama", "tie_word_embeddings": True}


@pytest.mark.parametrize("tied", [True, False])
def test_b05_a_shared_parameter_has_both_names_or_its_tie(tmp_path: Path, tied: bool) -> None:
    values = parameters({EMBEDDING: (6, 4), "model.norm.weight": (4,)})
    module = {n: t.bfloat16() for n, t in values.items()}
    module[HEAD] = module[EMBEDDING]
    write_zero2(tmp_path / "c", [values], 2, module=module, model={"shared_params": {HEAD: EMBEDDING}})
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text(json.dumps({**TIED, "tie_word_embeddings": tied}))
    found, record = converted(tmp_path / "c", tmp_path / "out", config_dir=config)
    assert same(found, values if tied else {**values, HEAD: values[EMBEDDING]})
    assert record["ties"] == ({HEAD: EMBEDDING} if tied else {})


@pytest.mark.parametrize("write", [torch.save, save_dcp], ids=["torch", "dcp"])
def test_b07_l8_a_tied_head_is_written_once_and_recorded(tmp_path: Path, write: Callable[..., object]) -> None:
    embedding = torch.randn(6, 4)
    state = {EMBEDDING: embedding, HEAD: embedding, "model.norm.weight": torch.randn(4)}
    write(state, tmp_path / ("pytorch_model.bin" if write is torch.save else "step-1"))
    path = tmp_path if write is torch.save else tmp_path / "step-1"
    (path / "config.json").write_text(json.dumps(TIED))
    found, record = converted(path, tmp_path / "out")
    assert found.keys() == {EMBEDDING, "model.norm.weight"}
    assert record["ties"] == {HEAD: EMBEDDING}


def test_b08_views_that_overlap_are_written_apart_and_it_is_said(tmp_path: Path) -> None:
    whole = torch.randn(300)
    state = {"a.weight": whole[:200], "c.weight": whole[100:]}
    torch.save(state, tmp_path / "pytorch_model.bin")
    found, record = converted(tmp_path, tmp_path / "out")
    assert same(found, state)
    assert any("a.weight and c.weight" in note for note in record["notes"])


def test_b08_views_side_by_side_need_no_word(tmp_path: Path) -> None:
    whole = torch.randn(300)
    torch.save({"a.weight": whole[:200], "c.weight": whole[200:]}, tmp_path / "pytorch_model.bin")
    assert not any("a.weight" in note for note in converted(tmp_path, tmp_path / "out")[1]["notes"])


@pytest.mark.parametrize("layout", ["rank files", "dcp", "safetensors"])
def test_b09_a_head_that_differs_is_never_dropped_for_the_config_s_sake(tmp_path: Path, layout: str) -> None:
    embedding = torch.randn(6, 4)
    head = embedding.clone()
    head[0] += 1
    state = {EMBEDDING: embedding, HEAD: head}
    path = tmp_path / "step-1"
    path.mkdir()
    if layout == "dcp":
        save_dcp(state, path)
    elif layout == "safetensors":
        save_file(state, path / "model.safetensors")
    else:
        torch.save(state, path / rank_name(1, 0))
    (path / "config.json").write_text(json.dumps(TIED))
    error = refused(path, tmp_path / "out")
    assert isinstance(error, InconsistentCheckpointError)
    assert error.tensor == HEAD
    (path / "config.json").write_text(json.dumps({**TIED, "tie_word_embeddings": False}))
    assert same(converted(path, tmp_path / "out")[0], state)


@pytest.mark.parametrize("case", ["every tensor", "only the embedding", "no tensor at all"])
def test_b43_an_adapter_that_was_not_gathered_is_incomplete_and_refused(tmp_path: Path, case: str) -> None:
    prefix, empty = "base_model.model.", torch.zeros(0)
    tensors = {f"{prefix}q.lora_A.weight": torch.randn(2, 4), f"{prefix}q.lora_B.weight": torch.randn(4, 2)}
    if case == "every tensor":
        tensors = dict.fromkeys(tensors, empty)
    tensors = {} if case == "no tensor at all" else {**tensors, f"{prefix}embed.weight": empty}
    save_file(tensors, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"], "modules_to_save": ["embed"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    age(tmp_path)
    assert check(locate(tmp_path)).state == "incomplete"
    refused(tmp_path, tmp_path / "out", adapter="export")


def test_b43_a_model_whose_weights_were_not_gathered_is_incomplete_too(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(0), "b.weight": torch.randn(3)}, tmp_path / "model.safetensors")
    age(tmp_path)
    assert check(locate(tmp_path)).state == "incomplete"
    assert refused(tmp_path, tmp_path / "out").tensor == "a.weight"


def test_l7_a_strided_view_is_read_over_its_whole_extent(tmp_path: Path) -> None:
    view = torch.arange(20.0).reshape(4, 5)[:, :2]
    torch.save({"v.weight": view, "t.weight": torch.arange(6.0).reshape(2, 3).T}, tmp_path / "pytorch_model.bin")
    found, _ = converted(tmp_path, tmp_path / "out")
    assert same(found, {"v.weight": view, "t.weight": torch.arange(6.0).reshape(2, 3).T})
