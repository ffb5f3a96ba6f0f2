"""From Megatron-Core's tensors to transformers' names and shapes. Nothing is computed: every result is windows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptflow.errors import InconsistentCheckpointError, UnsupportedCheckpointError
from ckptflow.manifest import EqualSources, LeftOut
from ckptflow.tensors import Shape, TensorSource, concatenate, narrow
from ckptflow.transforms.megatron_families import FAMILIES, Family
from ckptflow.transforms.megatron_rules import EMBEDDING, FINAL_NORM, OUTPUT, VALUE_HEAD, Kind, Rule
from ckptflow.transforms.model_dims import named_dims

LAYER = "decoder.layers.{layer}."
# Entries of a Megatron state dict that are no weights of the model.
NO_WEIGHTS = re.compile(
    r"(^|\.)_extra_state($|/)|(^|\.)inv_freq$|\.local_tokens_per_expert$|\.global_tokens_per_expert$"
)
MTP = re.compile(r"^mtp\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One Megatron tensor that a model of this config has.

    Attributes:
        megatron: possible names.
        hf: names of the results.
        shape: global shape; for ``vocab`` without padding rows.
        kind: how it is split.
        tp_dim: dim that tensor parallelism splits.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    shape: Shape
    kind: Kind
    tp_dim: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronModel:
    """What the config says about a Megatron checkpoint.

    Attributes:
        family: the tables.
        dims: named sizes.
        wanted: every tensor that must be there, in the model's order.
        tied: the output layer is the embedding.
    """

    family: Family
    dims: Mapping[str, int]
    wanted: tuple[Wanted, ...]
    tied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceTensors:
    """The model under transformers' names; fields as in ``CheckpointManifest``."""

    tensors: Mapping[str, TensorSource]
    ties: Mapping[str, str]
    equal: tuple[EqualSources, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]


def describe(config: Mapping[str, Any], output_rows: int | None) -> MegatronModel:
    """The tensors that a Megatron checkpoint of this model has.

    Args:
        config: transformers' config.json.
        output_rows: rows of ``output_layer.weight`` (with padding), None where the checkpoint has none.

    Raises:
        UnsupportedCheckpointError: no table for this ``model_type``.
    """
    family = next((f for f in FAMILIES if config.get("model_type") in f.model_types), None)
    if family is None:
        raise UnsupportedCheckpointError(
            "no table of Megatron's names for this model family",
            expected=", ".join(name for f in FAMILIES for name in f.model_types),
            found=config.get("model_type"),
        )
    dims = named_dims(config)
    tied = bool(config.get("tie_word_embeddings", family.tied_by_default))
    rules = _value_head(config, dims, output_rows)
    if rules:
        tied = False
    elif not tied or output_rows is not None:
        rules = [OUTPUT]
    wanted = [_wanted(EMBEDDING, dims), *_layers(family, config, dims), _wanted(FINAL_NORM, dims)]
    return MegatronModel(
        family=family, dims=dims, wanted=(*wanted, *(_wanted(rule, dims) for rule in rules)), tied=tied
    )


def _value_head(config: Mapping[str, Any], dims: Mapping[str, int], rows: int | None) -> list[Rule]:
    """Rules of a critic's or classifier's head: what the architecture says, or an output layer of a row or two."""
    architectures = config.get("architectures") or [""]
    classifies = any(name in str(architectures[0]) for name in ("TokenClassification", "SequenceClassification"))
    narrow_output = rows is not None and rows < dims["vocab"]
    if not classifies and not narrow_output:
        return []
    return list(VALUE_HEAD)


def _layers(family: Family, config: Mapping[str, Any], dims: Mapping[str, int]) -> Iterator[Wanted]:
    for layer in range(dims["layers"]):
        sparse = dims["experts"] > 0 and family.is_moe_layer(config, layer)
        for rule in (*family.attention, *(family.moe if sparse else family.dense)):
            if rule.when is not None and not rule.when(config):
                continue
            per_expert = "{expert}" in rule.megatron[0]
            for expert in range(dims["experts"]) if per_expert else (None,):
                yield _wanted(rule, dims, layer, expert)


def _wanted(rule: Rule, dims: Mapping[str, int], layer: int | None = None, expert: int | None = None) -> Wanted:
    def named(prefix: str, name: str) -> str:
        start = "" if layer is None else prefix.replace("{layer}", str(layer))
        return start + name.replace("{expert}", str(expert))

    absent = [dim for dim in rule.shape if dim not in dims]
    if absent:
        raise UnsupportedCheckpointError("config.json does not tell a size", tensor=rule.hf[0], expected=absent[0])
    return Wanted(
        megatron=tuple(named(LAYER, name) for name in rule.megatron),
        hf=tuple(named("model.layers.{layer}.", name) for name in rule.hf),
        shape=tuple(dims[dim] for dim in rule.shape),
        kind=rule.kind,
        tp_dim=rule.tp_dim,
    )


def to_huggingface(tree: Mapping[str, TensorSource], model: MegatronModel) -> HuggingFaceTensors:
    """All tensors under transformers' names.

    Args:
        tree: Megatron's name with global layer and expert numbers → global tensor.
        model: what must be there.

    Raises:
        InconsistentCheckpointError: a tensor is missing, doubled, or of another shape than the config says.
        UnsupportedCheckpointError: a tensor that the tables don't know.
    """
    used: set[str] = set()
    tensors: dict[str, TensorSource] = {}
    notes: list[str] = []
    for wanted in model.wanted:
        name = _find(wanted, tree)
        if name is None:
            continue
        used.add(name)
        source = tree[name]
        if wanted.kind == "vocab":
            source = _cut_vocabulary(name, source, wanted, notes)
        _check_shape(name, source, wanted)
        tensors.update(zip(wanted.hf, _split(source, wanted, model.dims), strict=True))
    if VALUE_HEAD[0].hf[0] in tensors:
        notes.append(f"the output layer is a head of {model.dims['labels']} rows, written as score")
    ties, equal = _tie(tensors, model)
    left_out = _unused(tree, used)
    return HuggingFaceTensors(
        tensors=tensors, ties=ties, equal=equal, left_out=tuple(left_out), notes=tuple(dict.fromkeys(notes))
    )


def _find(wanted: Wanted, tree: Mapping[str, TensorSource]) -> str | None:
    found = [name for name in wanted.megatron if name in tree]
    if len(found) > 1:
        raise InconsistentCheckpointError(
            "two tensors for one parameter", tensor=found[0], expected="one of them", found=", ".join(found)
        )
    if not found and wanted.hf != ("score.bias",):  # a value head may have no bias
        raise InconsistentCheckpointError(
            "the checkpoint lacks a tensor that the config's model has",
            tensor=wanted.hf[0],
            expected=" or ".join(wanted.megatron),
            found=_near(wanted.megatron[0], tree),
            fix="check that the config belongs to this checkpoint",
        )
    return found[0] if found else None


def _near(name: str, tree: Mapping[str, TensorSource]) -> str:
    start = name.rpartition(".")[0].rpartition(".")[0]
    near = [other for other in tree if other.startswith(start)]
    return ", ".join(near[:6]) or f"{len(tree)} other tensors"


def _cut_vocabulary(name: str, source: TensorSource, wanted: Wanted, notes: list[str]) -> TensorSource:
    rows, padded = wanted.shape[0], source.shape[0] if source.shape else 0
    if padded <= rows:
        return source
    notes.append(f"{padded - rows} rows of vocabulary padding are cut ({padded} → {rows})")
    return narrow(source, 0, 0, rows)


def _check_shape(name: str, source: TensorSource, wanted: Wanted) -> None:
    if source.shape != wanted.shape:
        raise InconsistentCheckpointError(
            "a tensor has another shape than the config's model",
            tensor=f"{name} → {', '.join(wanted.hf)}",
            expected=f"shape {list(wanted.shape)}",
            found=f"shape {list(source.shape)}",
            fix="check that the config belongs to this checkpoint",
        )


def _split(source: TensorSource, wanted: Wanted, dims: Mapping[str, int]) -> list[TensorSource]:
    if wanted.kind == "gate_up":
        half = source.shape[0] // 2
        return [narrow(source, 0, 0, half), narrow(source, 0, half, half)]
    if wanted.kind == "qkv":
        return split_qkv(source, dims["heads"], dims["kv_heads"], dims["head"])
    return [source]


def split_qkv(source: TensorSource, heads: int, kv_heads: int, head_dim: int) -> list[TensorSource]:
    """q, k and v out of Megatron's fused matrix or bias, whose rows are, per query group, ``[q…, k, v]``."""
    per_group = heads // kv_heads
    rows = (per_group + 2) * head_dim
    groups = [narrow(source, 0, group * rows, rows) for group in range(kv_heads)]
    cuts = ((0, per_group * head_dim), (per_group * head_dim, head_dim), ((per_group + 1) * head_dim, head_dim))
    return [concatenate([narrow(group, 0, start, size) for group in groups], 0) for start, size in cuts]


def _tie(tensors: dict[str, TensorSource], model: MegatronModel) -> tuple[dict[str, str], tuple[EqualSources, ...]]:
    """A tied output layer is absent, or a copy (the last pipeline stage has one) that must equal the embedding."""
    head, embedding = OUTPUT.hf[0], EMBEDDING.hf[0]
    if not model.tied:
        return {}, ()
    copy = tensors.pop(head, None)
    if copy is None:
        return {head: embedding}, ()
    reason = "config.json ties output layer and embedding, but the checkpoint holds different values for them"
    return {head: embedding}, (EqualSources(fqn=head, first=tensors[embedding], second=copy, reason=reason),)


def _unused(tree: Mapping[str, TensorSource], used: set[str]) -> Iterator[LeftOut]:
    for name, source in tree.items():
        if name in used:
            continue
        if NO_WEIGHTS.search(name):
            yield LeftOut(name=name, reason="not a weight", nbytes=source.nbytes)
        elif MTP.search(name):
            yield LeftOut(
                name=name, reason="multi-token prediction head, which transformers leaves out", nbytes=source.nbytes
            )
        else:
            raise UnsupportedCheckpointError(
                "a tensor that the tables of this model family don't know",
                tensor=name,
                found=f"shape {list(source.shape)}",
                fix="check that the config belongs to this checkpoint",
            )
