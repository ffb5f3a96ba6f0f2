"""From the names and row orders of a code base to those of transformers. Nothing is computed: results are windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckptflow.errors import InconsistentCheckpointError, UnsupportedCheckpointError
from ckptflow.manifest import EqualSources, LeftOut
from ckptflow.plan import ConsolidationPlan, PlannedTensor
from ckptflow.tensors import TensorSource, concatenate, narrow, unbind
from ckptflow.transforms.code_bases.registry import recognise
from ckptflow.transforms.code_bases.row_orders import blocks_to_groups, groups_to_blocks, pairs_to_halves
from ckptflow.transforms.code_bases.rules import CodeBase, Family, Seen
from ckptflow.transforms.code_bases.wanted import Wanted, wanted_head, wanted_of
from ckptflow.transforms.code_bases.whole_model import check_whole_model
from ckptflow.transforms.model_dims import Config, named_dims

RIGHT_CONFIG = "name the directory with the right config.json with --config"
TIE_HEAD = (
    "set tie_word_embeddings to true in config.json if the model was trained so, or name the right one with --config"
)
MERGE_LORA = "merge the adapter in the code base that trained it, and convert what that saves"
ORDER_NOTES = {
    "pairs": "rows of q and k are put from rotary pairs side by side, as {} has them, into halves",
    "groups": "q, k and v are cut out of fused matrices of query groups, as {} has them",
    "to groups": "fused q, k and v, one after another as {} has them, are put into query groups",
}


def use_names_of_transformers(
    plan: ConsolidationPlan, config: Config, config_dir: Path | None, path: Path
) -> ConsolidationPlan:
    """Name, cut, join and order the tensors of a code base's model as transformers does.

    Any other plan is left as it is, and so is one of a family without a table.

    Args:
        plan: what would be written under the names in the checkpoint.
        config: the content of config.json.
        config_dir: its directory; None where there is none.
        path: the checkpoint, for messages.

    Raises:
        InconsistentCheckpointError: a tensor is missing, doubled, or of another shape than config.json says.
        UnsupportedCheckpointError: a tensor that the tables don't know, or a model that they would convert wrongly.
    """
    known = recognise([*(tensor.fqn for tensor in plan.tensors), *plan.ties])
    family = None if known is None else known[0].family(config)
    if known is None or family is None or config_dir is None or any(tensor.fold for tensor in plan.tensors):
        return plan
    code_base, prefix = known
    renamed = _Renaming(code_base, prefix, family, config, plan, path).run()
    check_whole_model(renamed, config_dir, path)
    return renamed


@dataclass(frozen=True, slots=True)
class _Found:
    """A tensor of the checkpoint, under the name in the file."""

    fqn: str
    source: TensorSource


class _Renaming:
    """One plan under way to transformers' names."""

    def __init__(
        self, code_base: CodeBase, prefix: str, family: Family, config: Config, plan: ConsolidationPlan, path: Path
    ):
        self._code_base, self._prefix, self._family = code_base, prefix, family
        self._config, self._plan, self._path = config, plan, path
        self._dims = named_dims(config)
        self._found = self._by_spelling()
        self._used: set[str] = set()
        self._orders: set[str] = set()
        self._extra_checks: list[EqualSources] = []

    def run(self) -> ConsolidationPlan:
        self._check_refusals()
        wanted = wanted_of(self._code_base, self._family, self._config, self._dims)
        tensors = [tensor for one in wanted for tensor in self._made(one)]
        head, ties = self._head({tensor.fqn: tensor for tensor in tensors})
        left_out = [*self._plan.left_out, *self._leftovers()]
        return replace(
            self._plan,
            tensors=(*tensors, *head),
            ties=ties,
            equal=(*self._plan.equal, *self._extra_checks),
            left_out=tuple(left_out),
            notes=(*self._plan.notes, *self._notes()),
        )

    def _by_spelling(self) -> dict[str, _Found]:
        """Name as the tables have it → tensor, aliases too."""
        sources = {tensor.fqn: tensor.source for tensor in self._plan.tensors}
        sources |= {alias: sources[owner] for alias, owner in self._plan.ties.items() if owner in sources}
        found: dict[str, _Found] = {}
        for fqn, source in sources.items():
            name = self._code_base.spelled(fqn.removeprefix(self._prefix))
            other = found.setdefault(name, _Found(fqn, source))
            if other.fqn != fqn:
                raise InconsistentCheckpointError(
                    "two tensors for one parameter",
                    file=self._path,
                    tensor=fqn,
                    expected="one of them",
                    found=f"{other.fqn} and {fqn}",
                )
        return found

    def _check_refusals(self) -> None:
        names = frozenset(found.fqn for found in self._found.values())
        seen = Seen(config=self._config, names=names, path=self._path)
        for refusal in self._family.refused:
            if refusal.applies(seen):
                raise UnsupportedCheckpointError(refusal.what, file=self._path, found=refusal.found, fix=refusal.fix)

    def _made(self, wanted: Wanted) -> Iterator[PlannedTensor]:
        parts = [self._take(own, wanted) for own in wanted.own]
        dtypes = {part.source.dtype.name for part in parts}
        if len(dtypes) > 1:
            raise InconsistentCheckpointError(
                "tensors that become one have several dtypes",
                file=self._path,
                tensor=next(iter(wanted.hf)),
                found=", ".join(f"{part.fqn} {part.source.dtype}" for part in parts),
            )
        names = tuple(part.fqn for part in parts)
        for fqn, source in zip(wanted.hf, self._cut([part.source for part in parts], wanted), strict=True):
            yield PlannedTensor(fqn=fqn, source=source, dtype=source.dtype, source_fqns=names)

    def _take(self, own: str, wanted: Wanted) -> _Found:
        found = self._found.get(own)
        if found is None:
            raise InconsistentCheckpointError(
                "the checkpoint lacks a tensor that the config's model has",
                file=self._path,
                tensor=next(iter(wanted.hf)),
                expected=f"{own}, as {self._code_base.name} names it",
                found=self._near(own),
                fix=TIE_HEAD if own == self._family.head[0].own[0] else RIGHT_CONFIG,
            )
        self._used.add(own)
        shape, expected = found.source.shape, wanted.own[own]
        if shape != expected:
            padding = wanted.padded and shape[1:] == expected[1:] and shape[0] > expected[0]
            raise InconsistentCheckpointError(
                "a tensor has another shape than the config's model",
                file=self._path,
                tensor=f"{found.fqn} → {', '.join(list(wanted.hf)[:3])}",
                expected=f"shape {list(expected)}",
                found=f"shape {list(shape)}",
                fix=f"set vocab_size to {shape[0]} in config.json, if the rows beyond {expected[0]} are the trainer's "
                "padding: the model was trained with them"
                if padding
                else RIGHT_CONFIG,
            )
        return found

    def _near(self, own: str) -> str:
        start = own.rpartition(".")[0].rpartition(".")[0]
        near = [found.fqn for name, found in self._found.items() if name.startswith(start)]
        return ", ".join(near[:6]) or f"{len(self._found)} other tensors"

    def _cut(self, parts: list[TensorSource], wanted: Wanted) -> list[TensorSource]:
        if wanted.stacked:
            return unbind(parts[0])
        source = parts[0] if len(parts) == 1 else concatenate(parts, 0)
        dims = self._dims
        groups = (dims["heads"], dims["kv_heads"], dims["head"])
        if wanted.order != "kept":
            self._orders.add(wanted.order)
        if wanted.order == "pairs":
            if dims["head"] % 2:
                raise UnsupportedCheckpointError(
                    "rotary pairs of an odd number of rows", file=self._path, found=f"head_dim {dims['head']}"
                )
            source = pairs_to_halves(source, dims["head"])
        elif wanted.order == "groups":
            source = groups_to_blocks(source, *groups)
        elif wanted.order == "to groups":
            source = blocks_to_groups(source, *groups)
        if len(wanted.hf) == 1:
            return [source]
        cuts, at = [], 0
        for shape in wanted.hf.values():
            cuts.append(narrow(source, 0, at, shape[0]))
            at += shape[0]
        return cuts

    def _head(self, model: Mapping[str, PlannedTensor]) -> tuple[list[PlannedTensor], dict[str, str]]:
        """A tied head is absent, or a copy that must equal the embedding."""
        matrix, *others = wanted_head(self._family, self._dims)
        own, hf = next(iter(matrix.own)), next(iter(matrix.hf))
        rest = [tensor for one in others for tensor in self._made(one)]
        tied = bool(self._config.get("tie_word_embeddings", self._family.tied_by_default))
        if not tied:
            return [*self._made(matrix), *rest], {}
        embedding = model[self._family.embedding]
        if own in self._found:
            (copy,) = self._made(matrix)
            if copy.source != embedding.source:
                reason = (
                    f"config.json ties {hf} to {embedding.fqn}, but they were trained apart; set tie_word_embeddings "
                    "to false in config.json to keep both"
                )
                check = EqualSources(fqn=hf, first=embedding.source, second=copy.source, reason=reason)
                self._extra_checks.append(check)
        return rest, {hf: embedding.fqn}

    def _leftovers(self) -> Iterator[LeftOut]:
        for name, found in self._found.items():
            if name in self._used:
                continue
            bare = found.fqn.removeprefix(self._prefix)
            reason = next((why for pattern, why in self._code_base.left_out if pattern.search(bare)), None)
            if reason is None and self._family.balancing is not None and name.endswith(self._family.balancing):
                reason = self._balancing(found)
            if reason is None:
                raise UnsupportedCheckpointError(
                    f"a tensor that the tables of {self._code_base.name} don't know for this model family",
                    file=self._path,
                    tensor=found.fqn,
                    found=f"shape {list(found.source.shape)}",
                    fix=MERGE_LORA if "lora" in found.fqn.lower() else RIGHT_CONFIG,
                )
            yield LeftOut(name=found.fqn, reason=reason, nbytes=found.source.nbytes)

    def _balancing(self, found: _Found) -> str:
        """A bias that is the same for all experts chooses the same ones as none: its neighbours must be equal."""
        count = found.source.numel
        self._extra_checks.append(
            EqualSources(
                fqn=found.fqn,
                first=narrow(found.source, 0, 0, count - 1),
                second=narrow(found.source, 0, 1, count - 1),
                reason="experts were chosen with a bias that is not the same for all of them, and transformers' model "
                "has none: it would choose others",
            )
        )
        return "a bias that is the same for all experts, and that transformers' model has not"

    def _notes(self) -> list[str]:
        name = self._code_base.name
        notes = [f"tensors are named as transformers names them; the checkpoint has the names of {name}"]
        return notes + [ORDER_NOTES[order].format(name) for order in ORDER_NOTES if order in self._orders]
