"""Tied weights: one copy where config and values agree, none dropped where they don't."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptflow.manifest import EqualSources
from ckptflow.plan import ConsolidationPlan, PlannedTensor

TIES = "tie_word_embeddings"
HEAD = "lm_head.weight"
# Last parts of the input embedding's FQN in transformers' decoder models.
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "tok_embeddings.weight")


def declares_tied(config: Mapping[str, object]) -> bool:
    """Whether config.json ties the output head to the input embedding.

    A text config inside counts where the outer one says nothing: transformers follows the outer one, and writes the
    inner one's default beside it. Its default is True where a config names nothing, but save_pretrained leaves the
    field out only when it equals the class's default, which the file doesn't tell: an absent field declares nothing.
    """
    if isinstance(config.get(TIES), bool):
        return config[TIES] is True
    nested = [value for key, value in config.items() if key in ("text_config", "llm_config", "language_config")]
    return any(isinstance(c, Mapping) and c.get(TIES) is True for c in nested)


def resolve_ties(plan: ConsolidationPlan, config: Mapping[str, object]) -> ConsolidationPlan:
    """Write a tied pair once if the config ties it, twice if it doesn't.

    Two names on one storage are written once only where the config makes loaders tie them again; otherwise the alias
    becomes a tensor of its own. Two separate tensors that the config ties are written once, and must then hold the
    same bits: the plan's ``equal`` says so, and the conversion is refused where they differ.
    """
    tied = declares_tied(config)
    by_fqn = {t.fqn: t for t in plan.tensors}
    aliases, extra, notes = {}, [], list(plan.notes)
    for alias, owner in plan.ties.items():
        if tied and _is_head_pair(alias, owner):
            aliases[alias] = owner
        elif owner in by_fqn:
            extra.append(replace(by_fqn[owner], fqn=alias))
            notes.append(f"{alias} shares storage with {owner}; config.json does not tie them, so both are written")
    plan = _prefer_embedding(replace(plan, tensors=(*plan.tensors, *extra), ties=aliases, notes=tuple(notes)))
    return _drop_tied_head(plan) if tied else plan


def _is_head_pair(alias: str, owner: str) -> bool:
    names = (alias, owner)
    return any(n.endswith(HEAD) for n in names) and any(n.endswith(EMBEDDINGS) for n in names)


def _prefer_embedding(plan: ConsolidationPlan) -> ConsolidationPlan:
    """The owner of a tied pair is the embedding, whichever name the file had first: loaders look for that one."""
    swaps = {owner: alias for alias, owner in plan.ties.items() if owner.endswith(HEAD)}
    if not swaps:
        return plan
    tensors = tuple(replace(t, fqn=swaps[t.fqn]) if t.fqn in swaps else t for t in plan.tensors)
    ties = {(o if o in swaps else a): (a if o in swaps else o) for a, o in plan.ties.items()}
    return replace(plan, tensors=tensors, ties=ties)


def _drop_tied_head(plan: ConsolidationPlan) -> ConsolidationPlan:
    head = _only(plan, HEAD)
    embedding = _only(plan, *EMBEDDINGS)
    if head is None or embedding is None or head.shape != embedding.shape:
        return plan
    check = EqualSources(
        fqn=head.fqn,
        first=embedding.source,
        second=head.source,
        reason=f"config.json ties it to {embedding.fqn}, but they were trained apart; set tie_word_embeddings to false "
        "in config.json to keep both",
    )
    return replace(
        plan,
        tensors=tuple(t for t in plan.tensors if t.fqn != head.fqn),
        ties={**plan.ties, head.fqn: embedding.fqn},
        equal=(*plan.equal, check),
    )


def _only(plan: ConsolidationPlan, *endings: str) -> PlannedTensor | None:
    found = [t for t in plan.tensors if t.fqn.endswith(endings)]
    return found[0] if len(found) == 1 else None
