"""All code bases with tables, and which one a checkpoint's names are of."""

from __future__ import annotations

from collections.abc import Iterable

from ckptflow.transforms.code_bases.litgpt import LITGPT, OLD_LITGPT
from ckptflow.transforms.code_bases.rules import CodeBase
from ckptflow.transforms.code_bases.torchtitan import TORCHTITAN
from ckptflow.transforms.code_bases.torchtune import TORCHTUNE

CODE_BASES = (TORCHTITAN, TORCHTUNE, LITGPT, OLD_LITGPT)


def recognise(fqns: Iterable[str]) -> tuple[CodeBase, str] | None:
    """The code base that has such names, and the prefix that a wrapper put before them.

    None where it can't be told: no name is of any, or names are of several or behind several prefixes.
    """
    found = {
        (number, match["prefix"])
        for fqn in fqns
        for number, code_base in enumerate(CODE_BASES)
        if (match := code_base.mark.fullmatch(fqn)) is not None
    }
    if len(found) != 1:
        return None
    number, prefix = found.pop()
    return CODE_BASES[number], prefix


def tables_of(code_base: CodeBase) -> str:
    """The ``model_type`` of all its families, for people."""
    return ", ".join(kind for family in code_base.families for kind in family.model_types)
