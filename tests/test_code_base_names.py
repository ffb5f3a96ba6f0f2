"""Models under the names and row orders of torchtitan, torchtune and litgpt come out as transformers saves them."""

from __future__ import annotations

import json
import random
import re
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, Shard

from ckptflow.convert import convert
from ckptflow.dtypes import DTYPES
from ckptflow.errors import CheckpointError, InconsistentCheckpointError, UnsupportedCheckpointError
from ckptflow.request import ConvertRequest
from ckptflow.tensors import SourceFile, TensorSource, check_tiling, concatenate, whole
from ckptflow.transforms.code_bases.registry import CODE_BASES, recognise
from ckptflow.transforms.code_bases.row_orders import blocks_to_groups, groups_to_blocks, pairs_to_halves
from ckptflow.validate.reread.torch_file import TorchFileRereader
from ckptflow.validate.verify import verify
from code_base_models import CASES, Tensors, as_litgpt, as_torchtitan, as_torchtune, config_of, saved_model
from rank_writer import mesh_of, save_ranks, sharded
from validation import check_named


def as_file(weights: Tensors, directory: Path) -> Path:
    directory.mkdir(parents=True)
    torch.save({"model": weights}, directory / "lit_model.pth")
    return directory / "lit_model.pth"


def as_dcp(weights: Tensors, directory: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {**weights, "train_state": {"step": torch.tensor(3)}}, checkpoint_id=directory / "step-3", no_dist=True
        )
    return directory / "step-3"


def as_nested_dcp(weights: Tensors, directory: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights, "epochs_run": 1}, checkpoint_id=directory / "epoch_1", no_dist=True)
    return directory / "epoch_1"


def as_safetensors(weights: Tensors, directory: Path) -> Path:
    directory.mkdir(parents=True)
    save_file(weights, directory / "model.safetensors")
    return directory


def as_lightning(weights: Tensors, directory: Path) -> Path:
    directory.mkdir(parents=True)
    state = {f"net.{name}": value for name, value in weights.items()} | {"criterion.weight": torch.ones(3)}
    torch.save({"state_dict": state, "pytorch-lightning_version": "2.5.0", "epoch": 1}, directory / "last.ckpt")
    return directory / "last.ckpt"


def as_ranks(weights: Tensors, directory: Path) -> Path:
    """Three ranks, which cut heads anywhere, and matrices along either dim."""

    def part(value: torch.Tensor) -> DTensor:
        return sharded(value, mesh_of((3,)), [Shard(1 if value.ndim > 1 and value.shape[0] % 2 == 0 else 0)])

    return save_ranks(directory, 3, lambda _: {name: part(value) for name, value in weights.items()})


def as_ranks_by_rows(weights: Tensors, directory: Path) -> Path:
    return save_ranks(
        directory, 3, lambda _: {name: sharded(value, mesh_of((3,)), [Shard(0)]) for name, value in weights.items()}
    )


def as_wrapped_ranks(weights: Tensors, directory: Path) -> Path:
    return as_ranks({f"model.{name}": value for name, value in weights.items()}, directory)


def run(source: Path, tmp_path: Path, out: str = "out") -> dict[str, Any]:
    """Convert beside the config that ``saved_model`` left."""
    request = ConvertRequest(path=source, out=tmp_path / out, config_dir=tmp_path / "config", dtype="float32")
    return dict(convert(request))


def assert_same(out: Path, wanted: Tensors) -> None:
    found = load_file(out / "model.safetensors")
    assert set(found) == set(wanted)
    for fqn, value in wanted.items():
        assert torch.equal(found[fqn], value), fqn


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


def llama(tmp_path: Path, **changes: Any) -> tuple[Tensors, Tensors]:
    """What transformers saves, and the same in torchtitan's names."""
    config = config_of("llama", **changes)
    saved = saved_model(config, tmp_path / "config")
    return saved, as_torchtitan(dict(saved), config)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("layers.1.attention.qkv_linear.wk.weight"), "lacks a tensor that the config's model has"),
        (lambda w: w.update({"layers.0.attention.wq.lora_a.weight": torch.ones(2, 24)}), "tables of torchtitan"),
        (lambda w: w.update({"output.weight": torch.ones(40, 24)}), "two tensors for one parameter"),
        (lambda w: w.update({"layers.2.ffn_norm.weight": torch.ones(24)}), "tables of torchtitan"),
        (lambda w: w.update({"norm.weight": torch.ones(23)}), "another shape than the config's model"),
        (lambda w: w.pop("lm_head.weight"), "lacks a tensor that the config's model has"),
    ],
    ids=["missing", "lora", "two spellings", "a layer more", "shape", "no head"],
)
def test_a_model_that_is_not_the_configs_is_refused(
    change: Callable[[Tensors], Any], message: str, tmp_path: Path
) -> None:
    _, weights = llama(tmp_path)
    change(weights)
    with pytest.raises(CheckpointError, match=message):
        run(as_dcp(weights, tmp_path / "run"), tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
    ],
)
def test_a_config_that_the_code_bases_model_can_not_have_is_refused(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    plain = config_of(kind)
    weights = as_torchtitan(saved_model(plain, tmp_path / "plain"), plain)
    config_of(kind, **changes).save_pretrained(tmp_path / "config")
    with pytest.raises(UnsupportedCheckpointError) as refused:
        run(as_dcp(weights, tmp_path / "run"), tmp_path)
    assert message in str(refused.value)


def test_a_litgpt_model_whose_own_config_interleaves_pairs_is_refused(tmp_path: Path) -> None:
    config = config_of("llama")
    saved = saved_model(config, tmp_path / "config")
    source = as_file(as_litgpt(dict(saved), config), tmp_path / "run")
    (tmp_path / "run" / "model_config.yaml").write_text("name: tiny\nrope_interleave: true\n")
    with pytest.raises(UnsupportedCheckpointError, match="rotary pairs lie side by side"):
        run(source, tmp_path)
    (tmp_path / "run" / "model_config.yaml").write_text("name: tiny\nrope_interleave: false\n")
    run(source, tmp_path)
    assert_same(tmp_path / "out", saved)


def test_a_phi_that_turns_a_part_of_its_heads_is_not_torchtunes(tmp_path: Path) -> None:
    config = config_of("phi3", head_dim=8, partial_rotary_factor=0.5)
    source = as_file(as_torchtune(saved_model(config, tmp_path / "config"), config), tmp_path / "run")
    with pytest.raises(UnsupportedCheckpointError, match="turns a part of them"):
        run(source, tmp_path)


def test_square_experts_under_old_names_are_refused(tmp_path: Path) -> None:
    config = config_of("qwen3_moe", moe_intermediate_size=24)
    saved = saved_model(config, tmp_path / "config")
    run(as_dcp(as_torchtitan(dict(saved), config), tmp_path / "new"), tmp_path)
    assert_same(tmp_path / "out", saved)
    with pytest.raises(UnsupportedCheckpointError, match="experts are square"):
        run(as_dcp(as_torchtitan(dict(saved), config, new=False), tmp_path / "old"), tmp_path)


@pytest.mark.parametrize("absurd", [{"num_experts": 10**7, "num_local_experts": 10**7}, {"num_hidden_layers": 10**4}])
def test_a_config_of_absurd_sizes_is_refused_soon(absurd: dict[str, int], tmp_path: Path) -> None:
    config = config_of("qwen3_moe")
    weights = as_torchtitan(saved_model(config, tmp_path / "config"), config)
    path = tmp_path / "config" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **absurd}))
    began = time.monotonic()
    with pytest.raises(CheckpointError):
        run(as_dcp(weights, tmp_path / "run"), tmp_path)
    assert time.monotonic() - began < 20


def test_padding_of_the_vocabulary_is_told_and_not_cut(tmp_path: Path) -> None:
    config = config_of("llama")
    weights = as_litgpt(saved_model(config, tmp_path / "config"), config)
    for name in ("transformer.wte.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], torch.zeros(24, 24)])
    with pytest.raises(InconsistentCheckpointError) as refused:
        run(as_file(weights, tmp_path / "run"), tmp_path)
    assert "set vocab_size to 64" in str(refused.value)


def test_a_tied_head_that_was_trained_apart_is_refused(tmp_path: Path) -> None:
    _, weights = llama(tmp_path, tie_word_embeddings=True)
    weights["lm_head.weight"][3, 3] += 1
    with pytest.raises(InconsistentCheckpointError, match="two copies of a tensor differ"):
        run(as_dcp(weights, tmp_path / "run"), tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_on_the_embeddings_storage_is_written_once_where_the_config_ties_it(tied: bool, tmp_path: Path) -> None:
    saved, weights = llama(tmp_path, tie_word_embeddings=True)
    config_of("llama", tie_word_embeddings=tied).save_pretrained(tmp_path / "config")
    weights["lm_head.weight"] = weights["tok_embeddings.weight"]
    run(as_file(weights, tmp_path / "run"), tmp_path)
    both = {"lm_head.weight": saved["model.embed_tokens.weight"]}
    assert_same(tmp_path / "out", saved if tied else saved | both)


def test_a_tied_head_is_dropped_by_the_familys_default_too(tmp_path: Path) -> None:
    config = config_of("gemma")
    saved = saved_model(config, tmp_path / "config")
    path = tmp_path / "config" / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "tie_word_embeddings"}))
    weights = as_litgpt(dict(saved), config)
    weights["lm_head.weight"][0, 0] += 1
    with pytest.raises(InconsistentCheckpointError, match="two copies of a tensor differ"):
        run(as_file(weights, tmp_path / "run"), tmp_path)


def test_tensors_that_become_one_must_have_one_dtype(tmp_path: Path) -> None:
    config = config_of("phi3")
    weights = as_torchtune(saved_model(config, tmp_path / "config"), config)
    weights["layers.0.attn.k_proj.weight"] = weights["layers.0.attn.k_proj.weight"].bfloat16()
    with pytest.raises(InconsistentCheckpointError, match="several dtypes"):
        run(as_file(weights, tmp_path / "run"), tmp_path)


@pytest.mark.parametrize("new", [True, False])
def test_a_balancing_bias_is_left_out_only_where_it_chooses_nothing(new: bool, tmp_path: Path) -> None:
    config = config_of("qwen3_moe")
    saved = saved_model(config, tmp_path / "config")
    weights = as_torchtitan(dict(saved), config, new)
    bias = f"layers.1.moe.expert_bias{'_E' if new else ''}"
    weights[bias] = torch.full((4,), 0.25)
    run(as_dcp(weights, tmp_path / "same"), tmp_path)
    assert_same(tmp_path / "out", saved)
    weights[bias] = torch.tensor([0.25, 0.25, 0.25, 0.5])
    with pytest.raises(InconsistentCheckpointError, match="two copies of a tensor differ") as refused:
        run(as_dcp(weights, tmp_path / "apart"), tmp_path, "refused")
    assert "it would choose others" in str(refused.value)


def test_a_family_without_a_table_is_refused_with_those_that_have_one(tmp_path: Path) -> None:
    config = config_of("llama")
    weights = as_torchtune(saved_model(config, tmp_path / "plain"), config)
    config_of("gemma2").save_pretrained(tmp_path / "config")
    with pytest.raises(InconsistentCheckpointError) as refused:
        run(as_dcp(weights, tmp_path / "run"), tmp_path)
    assert "they are those of torchtune, with tables for llama, mistral, gemma, qwen2, phi3" in str(refused.value)


def test_names_of_two_code_bases_are_of_none() -> None:
    titan, tune = "layers.0.attention.wq.weight", "layers.0.sa_norm.scale"
    assert recognise([titan]) is not None
    assert recognise([titan, tune]) is None
    assert recognise([titan, f"model.{titan}"]) is None
    assert recognise(["model.layers.0.self_attn.q_proj.weight", "transformer.h.0.attn.c_attn.weight"]) is None


def numbered(shape: tuple[int, ...], cuts: list[int]) -> TensorSource:
    """A tensor whose element i holds i, in one file for each part between ``cuts`` of its rows."""
    row = prod(shape[1:])
    bounds = [0, *cuts, shape[0]]
    parts = [
        whole(SourceFile(str(low), 1 << 20, 0), 4 * low * row, (high - low, *shape[1:]), DTYPES["float32"])
        for low, high in pairwise(bounds)
        if high > low
    ]
    return concatenate(parts, 0)


def elements(source: TensorSource) -> torch.Tensor:
    """The numbers that the pieces of a ``numbered`` tensor hold."""
    found = torch.full(source.shape, -1)
    for piece in source.pieces:
        box = torch.full(piece.sizes, piece.offset_bytes // 4)
        for dim, (size, stride) in enumerate(zip(piece.sizes, piece.strides, strict=True)):
            box += (torch.arange(size) * stride).view(-1, *[1] * (len(piece.sizes) - dim - 1))
        found[tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))] = box
    return found


@pytest.mark.parametrize("seed", range(20))
def test_row_orders_are_those_of_torch_wherever_shards_cut(seed: int) -> None:
    chosen = random.Random(seed)
    groups, each, head = chosen.randint(1, 3), chosen.randint(1, 3), 2 * chosen.randint(1, 4)
    rest = chosen.choice([(), (3,)])
    heads = groups * each

    def cut(rows: int) -> TensorSource:
        return numbered((rows, *rest), sorted(chosen.sample(range(rows), chosen.randint(0, min(4, rows - 1)))))

    source = cut(heads * head)
    halves = pairs_to_halves(source, head)
    check_tiling("q", halves)
    assert len(halves.pieces) <= 2 * (heads + len(source.pieces))
    assert torch.equal(
        elements(halves), elements(source).view(heads, head // 2, 2, *rest).transpose(1, 2).reshape(source.shape)
    )
    fused = cut((heads + 2 * groups) * head)
    blocks = groups_to_blocks(fused, heads, groups, head)
    check_tiling("qkv", blocks)
    parts = elements(fused).view(groups, each + 2, head, *rest).split([each, 1, 1], dim=1)
    assert torch.equal(elements(blocks), torch.cat([part.reshape(-1, *rest) for part in parts]))
    back = blocks_to_groups(blocks, heads, groups, head)
    check_tiling("qkv", back)
    assert torch.equal(elements(back), elements(fused))


def test_the_names_in_the_tables_are_spelled_once() -> None:
    for code_base in CODE_BASES:
        for family in code_base.families:
            rules = (*family.layer, *family.dense, *family.moe, *family.ends, *family.head)
            for name in (name for rule in rules for name in rule.own):
                assert code_base.spelled(f".{name}") == f".{name}"
                assert not re.search(r"_E$|_EFD$|_EDF$", name)
