"""Joins DeepSpeed's tensor-parallel ranks, by what AutoTP wrote about each parameter.

``universal_checkpoint_info`` names the parameters that are cut along dim 1 and those that every rank has whole; all
others are cut along dim 0. Newer versions add ``affine_map``: for each parameter the logical shape, and for each rank
which box of it the rank holds (deepspeed/checkpoint/constants.py, deepspeed/module_inject/auto_tp.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptflow.errors import InconsistentCheckpointError, UnsupportedCheckpointError
from ckptflow.formats.deepspeed_weights import Weights
from ckptflow.manifest import EqualSources
from ckptflow.tensors import (
    Shape,
    TensorSource,
    check_tiling,
    concatenate,
    contiguous_strides,
    narrow,
    place,
    window,
)

_ROW, _COPIED, _VOCABULARY = (
    "parameter_with_row_parallelism_patterns",
    "tp_replicated_parameter_patterns",
    "vocabulary_parameter_patterns",
)
# What these say needs more than a join: parameters that were averaged, or made of several cut ones.
_BEYOND_US = (
    "parameter_with_sub_params",
    "parameter_with_2_sub_params_cat_dim_0",
    "parameter_to_average_patterns",
    "autotp_unsupported_parameter_patterns",
)
_MAX_PATTERN_CHARS = 1000
REPLICA = "tensor-parallel ranks hold different values of a parameter that each has whole"


def join_tensor_parallel(ranks: Sequence[Weights]) -> tuple[dict[str, TensorSource], list[EqualSources]]:
    """Full tensors from those of all tensor-parallel ranks, in rank order; and the replicas that must be equal.

    Raises:
        UnsupportedCheckpointError: nothing says how a parameter was cut, or it says more than a join.
        InconsistentCheckpointError: the ranks don't fit together.
    """
    rules = _rules(ranks)
    names = set(ranks[0].tensors)
    for rank, weights in enumerate(ranks):
        if other := names ^ set(weights.tensors):
            raise InconsistentCheckpointError(
                "tensor-parallel ranks hold different parameters",
                file=weights.model.file.path,
                tensor=min(other),
                found=f"in one of ranks 0 and {rank} only",
            )
    tensors: dict[str, TensorSource] = {}
    equal: list[EqualSources] = []
    for fqn in ranks[0].tensors:
        parts = [weights.tensors[fqn] for weights in ranks]
        tensors[fqn] = rules.join(fqn, parts, equal)
        check_tiling(fqn, tensors[fqn])
    return tensors, equal


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    row: Sequence[re.Pattern[str]]
    copied: Sequence[re.Pattern[str]]
    vocabulary: Sequence[re.Pattern[str]]
    vocab_size: int | None
    boxes: Sequence[tuple[re.Pattern[str], Mapping[str, object]]]
    buffers: frozenset[str]
    file: str

    def join(self, fqn: str, parts: Sequence[TensorSource], equal: list[EqualSources]) -> TensorSource:
        described = next((entry for pattern, entry in self.boxes if pattern.match(fqn)), None)
        if described is not None:
            return self._join_boxes(fqn, described, parts, equal)
        row, copied = self._matches(self.row, fqn), self._matches(self.copied, fqn)
        if fqn in self.buffers or copied or (row and len(parts[0].shape) < 2):
            equal += [EqualSources(fqn=fqn, first=parts[0], second=p, reason=REPLICA) for p in parts[1:]]
            if any(p.shape != parts[0].shape for p in parts):
                raise self._misfit(fqn, list(parts[0].shape), [list(p.shape) for p in parts])
            return parts[0]
        dim = 1 if row else 0
        rest = {(*p.shape[:dim], *p.shape[dim + 1 :]) for p in parts}
        if len(rest) != 1 or not parts[0].shape or len({p.dtype for p in parts}) != 1:
            raise self._misfit(fqn, "shapes that differ along one dim only", [list(p.shape) for p in parts])
        joined = concatenate(parts, dim)
        if self.vocab_size and self._matches(self.vocabulary, fqn) and joined.shape[0] > self.vocab_size:
            return narrow(joined, 0, 0, self.vocab_size)
        return joined

    def _join_boxes(
        self, fqn: str, entry: Mapping[str, object], parts: Sequence[TensorSource], equal: list[EqualSources]
    ) -> TensorSource:
        shape = _shape(entry.get("logical_shape"))
        by_rank = entry.get("ranks")
        if shape is None or not isinstance(by_rank, Mapping):
            raise self._misfit(fqn, "logical_shape and ranks", sorted(entry))
        placed: dict[Shape, TensorSource] = {}
        for rank, part in enumerate(parts):
            for offsets, box in self._boxes(fqn, shape, by_rank.get(rank, by_rank.get(str(rank))), part):
                first = placed.setdefault(offsets, box)
                if first is not box:
                    equal.append(EqualSources(fqn=fqn, first=first, second=box, reason=REPLICA))
        return place(shape, parts[0].dtype, placed.items())

    def _boxes(self, fqn: str, shape: Shape, entry: object, part: TensorSource) -> list[tuple[Shape, TensorSource]]:
        if not isinstance(entry, Mapping) or _shape(entry.get("shard_shape")) != part.shape:
            raise self._misfit(fqn, entry, list(part.shape))
        boxes = []
        for piece in entry.get("pieces") or ():
            sizes = _shape(piece.get("shape")) if isinstance(piece, Mapping) else None
            source = _corner(piece.get("source"), shape) if sizes else None
            dest = _corner(piece.get("dest"), part.shape) if sizes else None
            if sizes is None or source is None or dest is None or len(sizes) != len(part.shape) != 0:
                raise UnsupportedCheckpointError(
                    "a DeepSpeed tensor-parallel parameter is cut in a way that can't be joined for sure",
                    file=self.file,
                    tensor=fqn,
                    found=str(piece)[:200],
                    fix="convert it with deepspeed.checkpoint.ds_to_universal first",
                )
            boxes.append((source, window(part, dest, sizes)))
        return boxes

    def _matches(self, patterns: Sequence[re.Pattern[str]], fqn: str) -> bool:
        return any(pattern.match(fqn) for pattern in patterns)

    def _misfit(self, fqn: str, expected: object, found: object) -> InconsistentCheckpointError:
        return InconsistentCheckpointError(
            "the tensor-parallel parts of a parameter don't fit together",
            file=self.file,
            tensor=fqn,
            expected=expected,
            found=found,
        )


def _rules(ranks: Sequence[Weights]) -> _Rules:
    model = ranks[0].model
    infos = [weights.model.settings.get("universal_checkpoint_info") for weights in ranks]
    info = infos[0]
    if not isinstance(info, Mapping) or any(other != info for other in infos):
        raise _refused(model.file.path, "the same universal_checkpoint_info in all ranks", "none, or different ones")
    for key in _BEYOND_US:
        if info.get(key):
            raise _refused(model.file.path, f"no {key}", str(info[key])[:200])
    if not any(key in info for key in (_ROW, _COPIED)):
        raise _refused(model.file.path, f"{_ROW} and {_COPIED}", ", ".join(map(str, info)))
    vocab_size = info.get("original_vocab_size")
    affine = info.get("affine_map")
    params = affine.get("params") if isinstance(affine, Mapping) and affine.get("version") == 1 else None
    entries = params.items() if isinstance(params, Mapping) else ()
    return _Rules(
        row=_patterns(info.get(_ROW), model.file.path),
        copied=_patterns(info.get(_COPIED), model.file.path),
        vocabulary=_patterns(info.get(_VOCABULARY), model.file.path),
        vocab_size=vocab_size if type(vocab_size) is int else None,
        boxes=[(_patterns([name], model.file.path)[0], e) for name, e in entries if isinstance(e, Mapping)],
        buffers=model.buffer_names,
        file=model.file.path,
    )


def _refused(file: str, expected: object, found: object) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        "a DeepSpeed tensor-parallel checkpoint that does not say how its parameters were cut",
        file=file,
        expected=expected,
        found=found,
        fix="convert it with deepspeed.checkpoint.ds_to_universal first",
    )


def _patterns(value: object, file: str) -> list[re.Pattern[str]]:
    """Patterns come from the file: only literal names with escapes and ``\\d+`` are taken, which can't run away."""
    patterns = []
    for text in value if isinstance(value, (list, tuple)) else ():
        harmless = isinstance(text, str) and len(text) <= _MAX_PATTERN_CHARS and _HARMLESS.fullmatch(text)
        if not harmless:
            raise _refused(file, "patterns of plain names", str(text)[:200])
        patterns.append(re.compile(text))
    return patterns


# Letters, digits, escaped or plain dots, \d+ before an escaped dot, and the anchors.
_HARMLESS = re.compile(r"\^?(?:[\w.]|\\[^\w]|\\d\+(?=\\\.))*\$?")


def _shape(value: object) -> Shape | None:
    if isinstance(value, (list, tuple)) and all(type(n) is int and n >= 0 for n in value):
        return tuple(value)
    return None


def _corner(value: object, shape: Shape) -> Shape | None:
    """Offsets of a box from ``[offset, strides]`` in elements; None unless the strides are those of ``shape``."""
    if not isinstance(value, (list, tuple)) or len(value) != 2 or type(value[0]) is not int:
        return None
    offset, strides = value[0], _shape(value[1])
    if strides != contiguous_strides(shape) or offset < 0:
        return None
    corner = []
    for stride in strides:
        corner.append(offset // stride)
        offset %= stride
    return tuple(corner)
