"""From experts stacked in one tensor, as transformers 5 has them in memory, to one tensor each, as it saves them.

In memory ``mlp.experts.gate_up_proj`` is [experts, 2 · intermediate, hidden], gate above up (without gates, ``up_proj``
is [experts, intermediate, hidden]), and ``down_proj`` is [experts, hidden, intermediate]. In files, and in
transformers 4, each expert has names and weights of its own; Granite's stay stacked under other names.
Trainers that save the state dict themselves leave what is in memory.

Source: conversion_mapping.py of transformers 5.24, read backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckptflow.plan import ConsolidationPlan, PlannedTensor
from ckptflow.tensors import TensorSource, narrow, unbind

GATE_UP, UP, DOWN = ".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How files name what belongs to experts.

    Attributes:
        gate: last part of the name of an expert's gate projection.
        up: that of its up projection.
        down: that of its down projection.
        renamed: parts of names in memory and in files; the first that is found is replaced.
        stacked: files hold them stacked, too.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renamed: tuple[tuple[str, str], ...] = ()
    stacked: bool = False

    def saved(self, fqn: str) -> str:
        """The name in files of a name in memory."""
        live, saved = next(((live, saved) for live, saved in self.renamed if live in fqn), ("", ""))
        return fqn.replace(live, saved, 1)


_MIXTRAL = ((".mlp.", ".block_sparse_moe."),)
_GRANITE = (
    (".block_sparse_moe.experts.gate_up_proj", ".block_sparse_moe.input_linear.weight"),
    (".block_sparse_moe.experts.down_proj", ".block_sparse_moe.output_linear.weight"),
    (".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"),
)
_PLAIN = (
    *("afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "flex_olmo", "glm4_moe"),
    *("glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe", "jamba", "nemotron_h", "olmoe", "qwen2_moe"),
    *("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "solar_open"),
)

FAMILIES: Mapping[str, ExpertNames] = {
    **dict.fromkeys(_PLAIN, ExpertNames()),
    "ernie4_5_moe": ExpertNames(renamed=((".mlp.gate.moe_statics.", ".mlp.moe_statics."),)),
    "exaone_moe": ExpertNames(renamed=((".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),)),
    "mimo_v2_flash": ExpertNames(renamed=((".self_attn.sinks", ".self_attn.attention_sink_bias"),)),
    **dict.fromkeys(
        ("granitemoe", "granitemoehybrid", "granitemoeshared"), ExpertNames(renamed=_GRANITE, stacked=True)
    ),
    "lfm2_moe": ExpertNames("w1", "w3", "w2"),
    **dict.fromkeys(("minimax", "minimax_m2", "mixtral"), ExpertNames("w1", "w3", "w2", _MIXTRAL)),
    "phimoe": ExpertNames("w1", "w3", "w2", ((".mlp.router.", ".block_sparse_moe.gate."), *_MIXTRAL)),
}
"""``model_type`` → names in files."""


def split_experts(plan: ConsolidationPlan, config: Mapping[str, object]) -> ConsolidationPlan:
    """Give each expert its own tensors where the model's family saves it so; any other plan is left as it is."""
    names = FAMILIES.get(str(config.get("model_type")))
    if names is None or not _are_stacked({tensor.fqn: tensor for tensor in plan.tensors}):
        return plan
    tensors = [part for tensor in plan.tensors for part in _split(tensor, names)]
    note = "experts have the names that transformers saves, not those of the stacks that the model has in memory"
    ties = {names.saved(alias): names.saved(owner) for alias, owner in plan.ties.items()}
    return replace(plan, tensors=tuple(tensors), ties=ties, notes=(*plan.notes, note))


def _are_stacked(tensors: Mapping[str, PlannedTensor]) -> bool:
    """Whether there are stacked experts, all whole: no adapter, no scales of quantized ones, shapes that fit."""
    stacks = [fqn for fqn in tensors if fqn.endswith((GATE_UP, UP, DOWN))]
    return bool(stacks) and all(_is_stack(fqn, tensors) for fqn in stacks)


def _is_stack(fqn: str, tensors: Mapping[str, PlannedTensor]) -> bool:
    module = fqn.rpartition(".")[0].removesuffix(".experts")
    gated = module + GATE_UP in tensors
    first, down = tensors.get(module + (GATE_UP if gated else UP)), tensors.get(module + DOWN)
    if first is None or down is None or any(t.fold is not None or t.source.dtype.itemsize < 2 for t in (first, down)):
        return False
    if len(down.shape) != 3:
        return False
    experts, hidden, intermediate = down.shape
    return first.shape == (experts, (2 if gated else 1) * intermediate, hidden)


def _split(tensor: PlannedTensor, names: ExpertNames) -> Iterator[PlannedTensor]:
    if names.stacked or not tensor.fqn.endswith((GATE_UP, UP, DOWN)):
        yield replace(tensor, fqn=names.saved(tensor.fqn))
        return
    module, _, leaf = tensor.fqn.rpartition(".")
    for number, expert in enumerate(unbind(tensor.source)):
        for part, source in _parts(leaf, expert, names):
            yield replace(tensor, fqn=names.saved(f"{module}.{number}.{part}.weight"), source=source)


def _parts(leaf: str, expert: TensorSource, names: ExpertNames) -> list[tuple[str, TensorSource]]:
    if leaf != "gate_up_proj":
        return [(names.down if leaf == "down_proj" else names.up, expert)]
    rows = expert.shape[0] // 2
    return [(names.gate, narrow(expert, 0, 0, rows)), (names.up, narrow(expert, 0, rows, rows))]
