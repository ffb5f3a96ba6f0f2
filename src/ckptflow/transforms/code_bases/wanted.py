"""The tensors that a code base's checkpoint of a config's model has: a family's rules, with numbers filled in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptflow.errors import UnsupportedCheckpointError
from ckptflow.tensors import Shape
from ckptflow.transforms.code_bases.rules import CodeBase, Family, Order, Rule
from ckptflow.transforms.model_dims import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A rule with its names and sizes, in elements.

    Attributes:
        own: names as the tables have them → shape.
        hf: names in transformers → shape.
        order: as in ``Rule``.
        stacked: as in ``Rule``; ``hf`` has one name for each expert.
        padded: rows are the vocabulary, which trainers pad.
    """

    own: Mapping[str, Shape]
    hf: Mapping[str, Shape]
    order: Order
    stacked: bool
    padded: bool


# More than any model has: a config that claims them would make tables of absurd size.
MAX_EXPERTS = 10**5


def wanted_of(code_base: CodeBase, family: Family, config: Config, dims: Mapping[str, int]) -> Iterator[Wanted]:
    """All but the head, in transformers' order: embedding, layers, final norm.

    Raises:
        UnsupportedCheckpointError: the config doesn't tell a size, or tells an absurd one.
    """
    if dims["experts"] > MAX_EXPERTS:
        raise UnsupportedCheckpointError(
            "config.json tells more experts than any model has",
            expected=f"at most {MAX_EXPERTS}",
            found=dims["experts"],
        )
    embedding, *last = (_filled(rule, dims) for rule in family.ends)
    yield embedding
    yield from _layers(code_base, family, config, dims)
    yield from last


def wanted_head(family: Family, dims: Mapping[str, int]) -> list[Wanted]:
    """The head, its matrix first."""
    return [_filled(rule, dims) for rule in family.head]


def _layers(code_base: CodeBase, family: Family, config: Config, dims: Mapping[str, int]) -> Iterator[Wanted]:
    for layer in range(dims["layers"]):
        sparse = dims["experts"] > 0 and family.is_sparse(config, layer)
        before = tuple(prefix.replace("{layer}", str(layer)) for prefix in (code_base.layer, family.hf_layer))
        for rule in (*family.layer, *(family.moe if sparse else family.dense)):
            if rule.when is not None and not rule.when(config):
                continue
            apart = "{expert}" in rule.own[0]
            for expert in range(dims["experts"]) if apart else (None,):
                yield _filled(rule, dims, before[0], before[1], expert)


def _filled(rule: Rule, dims: Mapping[str, int], own: str = "", hf: str = "", expert: int | None = None) -> Wanted:
    absent = [dim for dim in (*rule.rows, *rule.rest, *(("experts",) if rule.stacked else ())) if dim not in dims]
    if absent:
        raise UnsupportedCheckpointError("config.json does not tell a size", tensor=rule.hf[0], expected=absent[0])
    rest = tuple(dims[dim] for dim in rule.rest)
    parts: list[Shape] = [(dims[dim], *rest) for dim in rule.rows]
    joined: list[Shape] = [(sum(dims[dim] for dim in rule.rows), *rest)]
    stack = (dims["experts"],) if rule.stacked else ()
    names = [hf + name for name in rule.hf]
    if rule.stacked:
        names = [name.replace("{expert}", str(number)) for name in names for number in range(dims["experts"])]
        parts *= dims["experts"]
    elif expert is not None:
        names = [name.replace("{expert}", str(expert)) for name in names]
    own_names = [own + name.replace("{expert}", str(expert)) for name in rule.own]
    own_shapes = parts if len(rule.own) > 1 else joined
    return Wanted(
        own={name: (*stack, *shape) for name, shape in zip(own_names, own_shapes, strict=True)},
        hf=dict(zip(names, parts if len(names) > 1 else joined, strict=True)),
        order=rule.order,
        stacked=rule.stacked,
        padded=rule.rows == ("vocab",),
    )
