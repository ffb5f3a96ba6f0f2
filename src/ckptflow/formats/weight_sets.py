"""Which files of a Hugging Face directory are its weights, by name: kinds, variants, shards, leftovers.

Names as transformers writes and reads them (transformers/utils/__init__.py, modeling_utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckptflow.errors import AmbiguousCheckpointError
from ckptflow.manifest import LeftOut

Kind = Literal["safetensors", "bin"]

_SHARD = r"(?:-(?P<number>\d+)-of-(?P<count>\d+))?"
_WEIGHTS: dict[Kind, re.Pattern[str]] = {
    "safetensors": re.compile(rf"^model(?:\.(?P<v1>[^.]+?))?{_SHARD}(?:\.(?P<v2>[^.]+))?\.safetensors$"),
    "bin": re.compile(rf"^pytorch_model(?:\.(?P<v1>[^.]+?))?{_SHARD}(?:\.(?P<v2>[^.]+))?\.bin$"),
}
_INDEX: dict[Kind, re.Pattern[str]] = {
    "safetensors": re.compile(r"^model(?:\.(?P<v1>[^.]+))?\.safetensors\.index(?:\.(?P<v2>[^.]+))?\.json$"),
    "bin": re.compile(r"^pytorch_model(?:\.(?P<v1>[^.]+))?\.bin\.index(?:\.(?P<v2>[^.]+))?\.json$"),
}

# Files that stand beside weights and are none, though some hold tensors.
NOT_WEIGHTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"^optimizer(_\d+)?\.(pt|bin)$"), "optimizer state, not weights"),
    (re.compile(r"^scheduler(_\d+)?\.(pt|bin)$"), "learning rate schedule, not weights"),
    (re.compile(r"^(scaler|sampler)\S*\.(pt|bin)$"), "trainer state, not weights"),
    (re.compile(r"^rng_state(_\d+)?\.pth$|^random_states_\d+\.pkl$"), "random state, not weights"),
    (re.compile(r"^training_args\.bin$"), "training arguments, not weights"),
    (re.compile(r"^trainer_state\.json$"), "training log, not weights"),
    (re.compile(r"^zero_to_\w+\.py$"), "a script, never run"),
    (re.compile(r"^adapter_model\.(safetensors|bin)$"), "an adapter beside the weights that are read"),
)
# Accelerate numbers the models of one save_state; the first has no number.
_OTHER_MODEL = re.compile(r"^(pytorch_)?model_\d+\.(safetensors|bin)$|^pytorch_model_fsdp_\d+\.bin$")
_LOOKS_LIKE_WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth|ckpt|msgpack|h5|gguf)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSet:
    """Weight files that make one model.

    Attributes:
        kind: file format.
        variant: such as ``fp16``; None for the default.
        shards: ``model-0000i-of-0000N`` names that are there; empty for a single file.
        count: the N of the names; 0 for a single file, or where only an index is there.
        single: the single file's name; empty for shards.
        index: name of the index; empty where there is none.
    """

    kind: Kind
    variant: str | None
    shards: tuple[str, ...] = ()
    count: int = 0
    single: str = ""
    index: str = ""

    @property
    def missing(self) -> list[int]:
        """Numbers of the shards that the names speak of and that aren't there."""
        there = {int(match["number"]) for name in self.shards if (match := _WEIGHTS[self.kind].match(name))}
        return [number for number in range(1, self.count + 1) if number not in there]

    @property
    def title(self) -> str:
        """How to call it in messages."""
        return self.single or self.index or f"{self.shards[0]} …"


def shard_count(name: str) -> int:
    """The N of ``model-0000i-of-0000N``; 0 where the name has none."""
    match = next((m for pattern in _WEIGHTS.values() if (m := pattern.match(name))), None)
    return int(match["count"]) if match is not None and match["count"] else 0


def weight_sets(names: Iterable[str]) -> list[WeightSet]:
    """All sets that the names speak of, the one that transformers prefers first."""
    singles: dict[tuple[Kind, str | None], str] = {}
    shards: dict[tuple[Kind, str | None], dict[int, list[str]]] = {}
    indices: dict[tuple[Kind, str | None], str] = {}
    for name in names:
        for kind in _WEIGHTS:
            weights, index = _WEIGHTS[kind].match(name), _INDEX[kind].match(name)
            match = weights or index
            if match is None or (match["v1"] and match["v2"]):
                continue
            key = (kind, match["v1"] or match["v2"])
            if index is not None:
                indices[key] = name
            elif weights is not None and weights["count"]:
                shards.setdefault(key, {}).setdefault(int(weights["count"]), []).append(name)
            else:
                singles[key] = name
    found = [WeightSet(kind=kind, variant=variant, single=name) for (kind, variant), name in singles.items()]
    for key, index_name in indices.items():
        # The index says which shards belong together, so their counts don't matter.
        there = sorted(name for group in shards.pop(key, {}).values() for name in group)
        found.append(WeightSet(kind=key[0], variant=key[1], shards=tuple(there), index=index_name))
    for (kind, variant), groups in shards.items():
        for count, group in groups.items():
            found.append(WeightSet(kind=kind, variant=variant, shards=tuple(sorted(group)), count=count))
    order = ("safetensors", "bin")
    return sorted(found, key=lambda s: (s.variant or "", order.index(s.kind), not s.single, s.title))


def choose_weights(sets: list[WeightSet], dead: set[str], directory: Path) -> tuple[WeightSet, list[str]]:
    """The set that transformers would load, and notes on the others.

    Args:
        sets: as from ``weight_sets``.
        dead: titles of sharded sets whose index names files that aren't there.
        directory: for messages.

    Raises:
        AmbiguousCheckpointError: several variants and no default, or two sets of one kind that are both whole.
    """
    variants = {s.variant for s in sets}
    if None not in variants and len(variants) > 1:
        raise _ambiguous("several variants of the weights and no default", sets, directory)
    variant = None if None in variants else next(iter(variants))
    same = [s for s in sets if s.variant == variant]
    chosen = same[0]
    rivals = [s for s in same[1:] if s.kind == chosen.kind]
    if any(s.title not in dead and not s.missing for s in rivals):
        raise _ambiguous("two sets of weights in one directory", [chosen, *rivals], directory)
    notes = []
    for other in sets:
        if other is not chosen:
            why = "its files are not all there" if other in rivals else f"{chosen.title} is read, as transformers does"
            notes.append(f"{other.title} beside {chosen.title} is left out: {why}")
    return chosen, notes


def _ambiguous(what: str, sets: list[WeightSet], directory: Path) -> AmbiguousCheckpointError:
    return AmbiguousCheckpointError(
        what,
        file=directory,
        found=", ".join(s.title for s in sets),
        fix="move away what is left over from an older save, or name the single weight file",
    )


def left_out_files(names: Iterable[str], taken: Iterable[str], directory: Path) -> list[LeftOut]:
    """Files beside the weights that are no weights of this model, with reasons."""
    used = set(taken)
    left_out = []
    for name in names:
        if name in used:
            continue
        reason = next((why for pattern, why in NOT_WEIGHTS if pattern.match(name)), None)
        if reason is None and _OTHER_MODEL.match(name):
            reason = "another model of the same save: name the file itself to convert it"
        if reason is None and _LOOKS_LIKE_WEIGHTS.search(name):
            reason = "not among the weight files that were chosen"
        if reason is not None:
            left_out.append(LeftOut(name=name, reason=reason, nbytes=_size(directory / name)))
    return left_out


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # it vanished, or is a dangling link: the size is only shown, never used
