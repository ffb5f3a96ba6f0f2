"""Which tensors of a code base become which of transformers': what the tables are made of."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckptflow.transforms.model_dims import Condition, Config
from ckptflow.transforms.sparse_layers import none_sparse

Order = Literal["kept", "pairs", "groups", "to groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Tensors of a code base, one after another along their rows, cut into those of transformers.

    Attributes:
        own: names in the code base; several are joined, in this order.
        hf: names in transformers; several are cut out of the rows, in this order. ``{expert}`` stands for all experts.
        rows: rows of each of ``own`` or ``hf``, whichever are more, in names of ``model_dims.named_dims``.
        rest: the other dims.
        order: ``pairs`` are rotary pairs side by side, ``groups`` query groups of [q…, k, v]; transformers has halves,
            and all queries, keys and values one after another. ``to groups`` is the other way round.
        stacked: ``own`` has the experts in a dim before ``rows``.
        when: whether a model of a config has it; None for always.
    """

    own: tuple[str, ...]
    hf: tuple[str, ...]
    rows: tuple[str, ...]
    rest: tuple[str, ...] = ()
    order: Order = "kept"
    stacked: bool = False
    when: Condition | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What tells that a model is not the tables'.

    Attributes:
        config: the content of config.json.
        names: those in the checkpoint.
        path: the checkpoint; code bases leave files of their own beside it.
    """

    config: Config
    names: frozenset[str]
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A model that the tables would convert wrongly.

    Attributes:
        applies: whether what is seen is one.
        what: one sentence, for people.
        found: what it was seen by.
        fix: what a person can do.
    """

    applies: Callable[[Seen], bool]
    what: str
    found: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The rules of one family in one code base.

    Attributes:
        model_types: ``model_type`` in config.json.
        layer: rules of each layer, without its MLP; names behind the layer's prefix on both sides.
        dense: rules of a dense layer's MLP.
        moe: rules of a mixture layer's MLP.
        ends: rules of what is outside the layers, without the head.
        embedding: transformers' name of the embedding.
        head: the head's rules; the first is the matrix that may be tied to the embedding.
        hf_layer: transformers' prefix of layer N.
        is_sparse: whether layer N is a mixture.
        tied_by_default: what ``tie_word_embeddings`` is where config.json leaves it out.
        refused: models of the family that are refused.
        balancing: own names of biases that only choose experts and have no place in transformers' model.
    """

    model_types: tuple[str, ...]
    layer: tuple[Rule, ...]
    dense: tuple[Rule, ...]
    ends: tuple[Rule, ...]
    head: tuple[Rule, ...]
    moe: tuple[Rule, ...] = ()
    embedding: str = "model.embed_tokens.weight"
    hf_layer: str = "model.layers.{layer}."
    is_sparse: Callable[[Config, int], bool] = none_sparse
    tied_by_default: bool = False
    refused: tuple[Refusal, ...] = ()
    balancing: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeBase:
    """A code base: how its checkpoints are known, and the families that it shares with transformers.

    Attributes:
        name: for people.
        mark: a name that only its models have; the group ``prefix`` is what a wrapper put before it.
        layer: its prefix of layer N.
        families: tables.
        spellings: part of a name in some versions → in the tables; the first that is found is replaced.
        left_out: names of what is no weight of the model → reason, for people.
    """

    name: str
    mark: re.Pattern[str]
    layer: str
    families: tuple[Family, ...]
    spellings: tuple[tuple[str, str], ...] = ()
    left_out: tuple[tuple[re.Pattern[str], str], ...] = ()

    def family(self, config: Config) -> Family | None:
        """The tables for a config; None where there are none."""
        return next((family for family in self.families if config.get("model_type") in family.model_types), None)

    def spelled(self, fqn: str) -> str:
        """A name as the tables have it."""
        for found, table in self.spellings:
            if found in fqn:
                return fqn.replace(found, table, 1)
        return fqn


def same(own: str, hf: str, *shape: str, when: Condition | None = None) -> Rule:
    """One tensor under another name."""
    return Rule(own=(own,), hf=(hf,), rows=shape[:1], rest=shape[1:], when=when)


def pairs(own: str, hf: str, rows: str, *rest: str) -> Rule:
    """A projection whose rows are rotary pairs side by side."""
    return Rule(own=(own,), hf=(hf,), rows=(rows,), rest=rest, order="pairs")


def stacked(own: str, hf: str, rows: str, *rest: str) -> Rule:
    """One tensor for each expert out of [experts, rows, …]."""
    return Rule(own=(own,), hf=(hf,), rows=(rows,), rest=rest, stacked=True)


def flagged(*keys: str) -> tuple[Refusal, ...]:
    """Refusals of configs that give the model parts which the code base's has not."""
    return tuple(
        Refusal(
            applies=lambda seen, key=key: bool(seen.config.get(key)),  # type: ignore[misc]
            what="the code base's model of this family lacks what config.json asks for",
            found=key,
            fix="name the directory with the right config.json with --config",
        )
        for key in keys
    )
