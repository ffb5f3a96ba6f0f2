"""Joins what tensor-parallel ranks hold. Windows only, no values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ckptflow.errors import InconsistentCheckpointError
from ckptflow.manifest import EqualSources
from ckptflow.tensors import Piece, Shape, TensorSource, concatenate, contiguous_strides, narrow
from ckptflow.transforms.megatron_names import Wanted

REPLICA_REASON = "ranks that should hold the same values hold different ones: files of several saves, or a broken run"


def viewed(source: TensorSource, shape: Shape) -> TensorSource | None:
    """The same bytes under another shape, as ``torch.view``; None where they don't lie in one run."""
    if len(source.pieces) != 1 or prod(shape) != source.numel:
        return None
    piece = source.pieces[0]
    if piece.sizes != source.shape or piece.strides != contiguous_strides(source.shape):
        return None
    whole = Piece(piece.file, piece.offset_bytes, contiguous_strides(shape), (0,) * len(shape), shape)
    return TensorSource(shape, source.dtype, (whole,))


def join_ranks(
    name: str, parts: Sequence[TensorSource], wanted: Wanted
) -> tuple[TensorSource, tuple[EqualSources, ...]]:
    """One global tensor out of the parts of all tensor-parallel ranks, in rank order.

    Whether a rank holds all of it or a part is told by its shape. In ``linear_fc1`` each rank has [gate; up] of its
    own, so that the global tensor is [all gates; all ups] and not the parts in a row.

    Raises:
        InconsistentCheckpointError: the parts fit neither way.
    """
    first = parts[0]
    if any((part.shape, part.dtype) != (first.shape, first.dtype) for part in parts):
        raise InconsistentCheckpointError(
            "tensor-parallel ranks hold parts of different shapes or dtypes",
            tensor=name,
            expected=f"shape {list(first.shape)}, {first.dtype}",
            found=", ".join(f"{list(part.shape)} {part.dtype}" for part in parts),
        )
    if len(parts) == 1:
        return first, ()
    if first.shape == wanted.shape and wanted.kind != "vocab":
        copies = (EqualSources(fqn=name, first=first, second=part, reason=REPLICA_REASON) for part in parts[1:])
        return first, tuple(copies)
    if wanted.tp_dim is None or len(first.shape) != len(wanted.shape):
        raise InconsistentCheckpointError(
            "a tensor that ranks don't share out has another shape than the config's model",
            tensor=name,
            expected=f"shape {list(wanted.shape)}",
            found=f"shape {list(first.shape)} in each of {len(parts)} ranks",
        )
    if wanted.kind == "gate_up":
        half = first.shape[0] // 2
        gates = [narrow(part, 0, 0, half) for part in parts]
        ups = [narrow(part, 0, half, half) for part in parts]
        return concatenate([*gates, *ups], 0), ()
    return concatenate(parts, wanted.tp_dim), ()


def join_tree(
    ranks: Mapping[str, Sequence[TensorSource]], wanted: Sequence[Wanted]
) -> tuple[dict[str, TensorSource], tuple[EqualSources, ...]]:
    """``join_ranks`` for each name; tensors that nobody wants are taken from the first rank."""
    rules = {name: one for one in wanted for name in one.megatron}
    tree: dict[str, TensorSource] = {}
    equal: list[EqualSources] = []
    for name, parts in ranks.items():
        rule = rules.get(name)
        if rule is None:
            tree[name] = parts[0]
            continue
        tree[name], copies = join_ranks(name, parts, rule)
        equal.extend(copies)
    return tree, tuple(equal)
