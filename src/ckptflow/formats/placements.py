"""Which box of a global tensor a rank's part of a DTensor is.

Semantics: ``_compute_local_shape_and_global_offset`` (torch/distributed/tensor/_utils.py) and ``_StridedShard``
(placement_types.py) of torch 2.13. Placements cut from the first mesh dim to the last. ``Shard(d)`` cuts as torch.chunk
does: chunks of ceil(n / parts), the last ones shorter or empty. ``_StridedShard(d, split_factor=s)`` says that later
mesh dims cut ``d`` into ``s`` parts before: it cuts each of these parts and gives a rank the same chunk of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod

from ckptflow.errors import CorruptFileError, UnsupportedCheckpointError
from ckptflow.tensors import Shape
from ckptflow.torchfiles import DTensor, Partial, Placement, Replicate, Shard, StridedShard, UnknownPlacement

Cut = tuple[int, int, int]
"""Parts that a dim is cut into, which of them is meant, and the split factor (1 for a plain Shard)."""

Cuts = tuple[tuple[int, tuple[Cut, ...]], ...]
"""Tensor dims that are cut, each with its cuts in the order of cutting."""

Run = tuple[int, int]
"""Start and length of neighbouring indices along one dim of the global tensor."""

Box = tuple[Shape, Shape, Shape]
"""Offsets in the global tensor, offsets in the rank's own tensor, sizes; in elements."""

# A split factor is a product of mesh dims; each part of it may become a box of its own.
MAX_SPLIT_FACTOR = 65536


def check_placements(fqn: str, tensor: DTensor, path: str) -> None:
    """Refuse placements that can't be merged, or that don't fit mesh and shape.

    Raises:
        UnsupportedCheckpointError: ``Partial``, or a placement of unknown kind.
        CorruptFileError: they contradict mesh or shape.
    """
    if len(tensor.placements) != len(tensor.mesh.shape):
        raise CorruptFileError(
            "a DTensor has another number of placements than its mesh has dims",
            file=path,
            tensor=fqn,
            expected=f"{len(tensor.mesh.shape)} for mesh {tensor.mesh.shape}",
            found=f"{len(tensor.placements)} placements",
        )
    for placement in tensor.placements:
        if isinstance(placement, (Partial, UnknownPlacement)):
            raise UnsupportedCheckpointError(
                "a tensor whose parts were never reduced"
                if isinstance(placement, Partial)
                else "a placement that ckptflow doesn't know",
                file=path,
                tensor=fqn,
                expected="Shard, _StridedShard or Replicate",
                found=f"Partial({placement.reduce_op})" if isinstance(placement, Partial) else placement.name,
                fix="redistribute it before saving",
            )
        if isinstance(placement, (Shard, StridedShard)) and not 0 <= placement.dim < len(tensor.shape):
            raise CorruptFileError(
                "a placement cuts a dim that the tensor doesn't have",
                file=path,
                tensor=fqn,
                expected=f"a dim of shape {list(tensor.shape)}",
                found=f"dim {placement.dim}",
            )
        if isinstance(placement, StridedShard) and not 1 <= placement.split_factor <= MAX_SPLIT_FACTOR:
            raise CorruptFileError("an absurd split factor", file=path, tensor=fqn, found=placement.split_factor)


ShardOrder = tuple[tuple[int, tuple[int, ...]], ...]
"""Tensor dim, and the mesh dims that cut it in the order of cutting."""


def possible_cuts(tensor: DTensor, coordinate: Shape) -> tuple[Cuts, ...]:
    """How a rank's part may have been cut out, most official reading first.

    There are two readings where ``_StridedShard`` stands for "a later mesh dim cut first", as FSDP2 over TP writes it.
    torch derives the part from left to right; FSDP really cut from right to left. Both give the same wherever they give
    the same sizes; where the tensor doesn't divide evenly, only one of them fits the sizes in the files.
    """
    return _possible_cuts(tensor.mesh.shape, tensor.placements, tensor.shard_order, coordinate)


# A checkpoint has millions of parts and few ways of cutting; so too below.
@lru_cache(maxsize=65536)
def _possible_cuts(
    mesh_shape: Shape, placements: tuple[Placement, ...], shard_order: ShardOrder | None, coordinate: Shape
) -> tuple[Cuts, ...]:
    if shard_order is not None and any(list(dims) != sorted(dims) for _, dims in shard_order):
        return (_ordered_cuts(mesh_shape, coordinate, shard_order),)
    left_to_right: dict[int, tuple[Cut, ...]] = {}
    for placement, parts, index in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, (Shard, StridedShard)):
            factor = placement.split_factor if isinstance(placement, StridedShard) else 1
            left_to_right[placement.dim] = (*left_to_right.get(placement.dim, ()), (parts, index, factor))
    official = tuple(left_to_right.items())
    if not any(isinstance(p, StridedShard) and p.split_factor > 1 for p in placements):
        return (official,)
    order = _order_of_strides(mesh_shape, placements)
    return (official,) if order is None else (official, _ordered_cuts(mesh_shape, coordinate, order))


def _order_of_strides(mesh_shape: Shape, placements: tuple[Placement, ...]) -> ShardOrder | None:
    """Mesh dims in the order of cutting that the split factors stand for; None where they stand for none.

    A split factor is the number of parts that later mesh dims cut earlier, so from the last mesh dim to the first each
    has one place in the order (``_maybe_convert_StridedShard_to_shard_order`` in torch's _dtensor_spec.py).
    """
    orders: dict[int, list[int]] = {}
    for mesh_dim in reversed(range(len(placements))):
        placement = placements[mesh_dim]
        if not isinstance(placement, (Shard, StridedShard)):
            continue
        order = orders.setdefault(placement.dim, [])
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        sizes = [mesh_shape[d] for d in order]
        place = next((i for i in range(len(order) + 1) if prod(sizes[:i]) == factor), None)
        if place is None:
            return None
        order.insert(place, mesh_dim)
    return tuple((dim, tuple(order)) for dim, order in orders.items())


def _ordered_cuts(mesh_shape: Shape, coordinate: Shape, order: ShardOrder) -> Cuts:
    return tuple((dim, tuple((mesh_shape[d], coordinate[d], 1) for d in mesh_dims)) for dim, mesh_dims in order)


@lru_cache(maxsize=65536)
def runs(size: int, cuts: tuple[Cut, ...]) -> tuple[Run, ...]:
    """Indices of a dim of ``size`` elements that remain after all cuts, in the order of the rank's own tensor."""
    kept: list[Run] = [(0, size)] if size else []
    for parts, index, factor in cuts:
        length = sum(n for _, n in kept)
        outer = -(-length // factor)
        chosen: list[Run] = []
        # A factor above the length makes empty parts only.
        for begin in range(0, length, outer) if outer else ():
            part = min(outer, length - begin)
            inner = -(-part // parts)
            start, stop = min(part, index * inner), min(part, (index + 1) * inner)
            chosen.extend(_take(kept, begin + start, begin + stop))
        kept = _joined(chosen)
    return tuple(kept)


def _take(kept: Sequence[Run], start: int, stop: int) -> Iterator[Run]:
    """Positions ``[start, stop)`` of the indices that ``kept`` lists."""
    at = 0
    for begin, length in kept:
        low, high = max(start, at), min(stop, at + length)
        if low < high:
            yield begin + low - at, high - low
        at += length


def _joined(pieces: Sequence[Run]) -> list[Run]:
    joined: list[Run] = []
    for start, length in pieces:
        if joined and joined[-1][0] + joined[-1][1] == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


@lru_cache(maxsize=65536)
def local_shape(shape: Shape, cuts: Cuts) -> Shape:
    """Shape of a rank's part, in elements."""
    sizes = list(shape)
    for dim, steps in cuts:
        sizes[dim] = sum(n for _, n in runs(shape[dim], steps))
    return tuple(sizes)


@lru_cache(maxsize=65536)
def boxes(shape: Shape, cuts: Cuts) -> tuple[Box, ...]:
    """The boxes of the global tensor that a rank's part is made of; none where it is empty."""
    cut_dims = dict(cuts)
    per_dim: list[list[tuple[int, int, int]]] = []
    for dim, size in enumerate(shape):
        at, rows = 0, []
        for start, length in runs(size, cut_dims.get(dim, ())):
            rows.append((start, at, length))
            at += length
        per_dim.append(rows)
    return tuple(
        (tuple(row[0] for row in box), tuple(row[1] for row in box), tuple(row[2] for row in box))
        for box in product(*per_dim)
    )


def replica_of(tensor: DTensor, coordinate: Sequence[int]) -> tuple[int, ...]:
    """The rank's coordinate on the mesh dims that repeat the tensor; ranks that differ here hold equal values."""
    return tuple(c for c, p in zip(coordinate, tensor.placements, strict=True) if isinstance(p, Replicate))
