"""Row orders of code bases, as windows and as the second reader's numbers, and how names are known."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch

from ckptflow.dtypes import DTYPES
from ckptflow.tensors import SourceFile, TensorSource, check_tiling, concatenate, whole
from ckptflow.transforms.code_bases.registry import CODE_BASES, recognise
from ckptflow.transforms.code_bases.row_orders import blocks_to_groups, groups_to_blocks, pairs_to_halves
from ckptflow.validate.reread.code_bases import CodeBaseRereader
from code_base_models import CASES, Tensors, config_of, saved_model


class Held:
    """A reader of tensors in memory."""

    how = "memory"

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def shape(self, fqn: str) -> tuple[int, ...] | None:
        return tuple(self._tensors[fqn].shape) if fqn in self._tensors else None

    def read(self, fqn: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        return self._tensors[fqn][tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]


@pytest.mark.parametrize(
    ("case", "fqn", "own"),
    [
        ("torchtune-llama", "self_attn.q_proj.weight", ("layers.1.attn.q_proj.weight",)),
        ("torchtune-phi3", "self_attn.qkv_proj.weight", tuple(f"layers.1.attn.{p}_proj.weight" for p in "qkv")),
        ("torchtune-phi3", "mlp.gate_up_proj.weight", ("layers.1.mlp.w1.weight", "layers.1.mlp.w3.weight")),
        ("torchtitan-qwen3_moe", "mlp.experts.2.up_proj.weight", ("layers.1.moe.routed_experts.inner_experts.w3_EFD",)),
        ("litgpt-qwen2", "self_attn.k_proj.bias", ("transformer.h.1.attn.qkv.bias",)),
        ("litgpt-gpt_neox", "attention.query_key_value.weight", ("transformer.h.1.attn.qkv.weight",)),
        ("older versions of litgpt-phi3", "self_attn.qkv_proj.weight", ("transformer.h.1.attn.attn.weight",)),
        ("older versions of litgpt-llama", "self_attn.v_proj.weight", ("transformer.h.1.attn.attn.weight",)),
    ],
)
def test_the_second_reader_gives_any_box(case: str, fqn: str, own: tuple[str, ...], tmp_path: Path) -> None:
    kind, written, _ = CASES[case]
    config = config_of(kind)
    saved = saved_model(config, tmp_path)
    wanted = saved[next(name for name in saved if name.endswith(f"layers.1.{fqn}"))]
    reader = CodeBaseRereader(Held(written(dict(saved), config)), json.loads((tmp_path / "config.json").read_text()))
    name = reader.name_for(own, f"model.layers.1.{fqn}")
    assert name is not None
    assert reader.shape(name) == tuple(wanted.shape)
    chosen = random.Random(3)
    for _ in range(40):
        low = tuple(chosen.randrange(n) for n in wanted.shape)
        sizes = tuple(chosen.randint(1, n - o) for n, o in zip(wanted.shape, low, strict=True))
        box = wanted[tuple(slice(o, o + n) for o, n in zip(low, sizes, strict=True))]
        assert torch.equal(reader.read(name, low, sizes), box)


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


def test_names_of_two_code_bases_are_of_none() -> None:
    titan, tune = "layers.0.attention.wq.weight", "layers.0.sa_norm.scale"
    assert recognise([titan]) is not None
    assert recognise([titan, tune]) is None
    assert recognise([titan, f"model.{titan}"]) is None
    assert recognise(["model.layers.0.self_attn.q_proj.weight", "transformer.h.0.attn.c_attn.weight"]) is None
