"""Models under the names and row orders of torchtitan, torchtune and litgpt come out as transformers saves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckptflow.transforms.code_bases.registry import CODE_BASES
from ckptflow.validate.reread.torch_file import TorchFileRereader
from ckptflow.validate.verify import verify
from code_base_models import CASES, Tensors, config_of, saved_model
from code_base_runs import (
    as_dcp,
    as_file,
    as_lightning,
    as_nested_dcp,
    as_ranks,
    as_ranks_by_rows,
    as_safetensors,
    as_wrapped_ranks,
    assert_same,
    llama,
    run,
)
from validation import check_named


@pytest.mark.parametrize("case", CASES)
def test_the_output_is_what_transformers_saves_and_a_second_reader_proves_it(case: str, tmp_path: Path) -> None:
    kind, written, changes = CASES[case]
    config = config_of(kind, **changes)
    saved = saved_model(config, tmp_path / "config")
    weights = written(dict(saved), config)
    source = as_file(weights, tmp_path / "run")
    record = run(source, tmp_path)
    assert_same(tmp_path / "out", saved)
    assert any(note.startswith("tensors are named as transformers names them") for note in record["notes"])
    report = verify(tmp_path / "out", against=source)
    assert report.failures == ()
    assert check_named(report, "values").figures["source read through"] == TorchFileRereader.how


def test_every_family_of_the_tables_is_held_to_transformers() -> None:
    listed = {(code_base.name, kind) for code_base in CODE_BASES for f in code_base.families for kind in f.model_types}
    names = {"torchtitan": "torchtitan or Meta's Llama", "torchtitan 0.2": "torchtitan or Meta's Llama"}
    written = {(names.get(case.split("-")[0], case.split("-")[0]), kind) for case, (kind, *_) in CASES.items()}
    assert written == listed


@pytest.mark.parametrize(
    "save", [as_dcp, as_nested_dcp, as_safetensors, as_lightning, as_ranks, as_ranks_by_rows, as_wrapped_ranks]
)
@pytest.mark.parametrize("case", ["torchtitan-llama", "torchtune-phi3", "older versions of litgpt-qwen2"])
def test_layouts_and_shards_make_no_difference(
    case: str, save: Callable[[Tensors, Path], Path], tmp_path: Path
) -> None:
    kind, written, _ = CASES[case]
    config = config_of(kind)
    saved = saved_model(config, tmp_path / "config")
    source = save(written(dict(saved), config), tmp_path / "run" / "checkpoint")
    run(source, tmp_path)
    assert_same(tmp_path / "out", saved)
    assert verify(tmp_path / "out", against=source).failures == ()


@pytest.mark.parametrize("order", ["pairs_to_halves", "groups_to_blocks", "blocks_to_groups"])
def test_rows_in_the_wrong_order_are_found_by_the_proof(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptflow.transforms.code_bases import rename

    cases = {
        "pairs_to_halves": "torchtune-llama",
        "groups_to_blocks": "older versions of litgpt-llama",
        "blocks_to_groups": "litgpt-gpt_neox",
    }
    kind, written, _ = CASES[cases[order]]
    config = config_of(kind)
    saved = saved_model(config, tmp_path / "config")
    source = as_file(written(dict(saved), config), tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(rename, order, lambda source, *sizes: source)
        run(source, tmp_path)
        failed = {check.name for check in verify(tmp_path / "out", against=source).failures}
    assert failed == {"values"}


def test_what_is_no_weight_is_left_out_with_a_reason(tmp_path: Path) -> None:
    saved, weights = llama(tmp_path)
    weights |= {"freqs_cis": torch.ones(4), "rope.freqs": torch.ones(2), "layers.0.attention.rope.cache": torch.ones(4)}
    record = run(as_dcp(weights, tmp_path / "run"), tmp_path)
    assert_same(tmp_path / "out", saved)
    reasons = {entry["name"]: entry["reason"] for entry in record["left_out"]}
    names = ("freqs_cis", "rope.freqs", "layers.0.attention.rope.cache")
    assert {reasons[name] for name in names} == {"computed from the config"}


def test_the_notes_tell_whose_names_they_were_and_which_rows_moved(tmp_path: Path) -> None:
    _, weights = llama(tmp_path)
    notes = run(as_dcp(weights, tmp_path / "run"), tmp_path)["notes"]
    assert any("the names of torchtitan" in note for note in notes)
    assert any("rows of q and k are put from rotary pairs side by side" in note for note in notes)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_on_the_embeddings_storage_is_written_once_where_the_config_ties_it(tied: bool, tmp_path: Path) -> None:
    saved, weights = llama(tmp_path, tie_word_embeddings=True)
    config_of("llama", tie_word_embeddings=tied).save_pretrained(tmp_path / "config")
    weights["lm_head.weight"] = weights["tok_embeddings.weight"]
    run(as_file(weights, tmp_path / "run"), tmp_path)
    both = {"lm_head.weight": saved["model.embed_tokens.weight"]}
    assert_same(tmp_path / "out", saved if tied else saved | both)
