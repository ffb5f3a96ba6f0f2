"""DeepSpeed's flat vectors, and where the parameters lie in them, as DeepSpeed's own zero_to_fp32.py walks over them.

Stages 1 and 2: the parameters of a param group lie one after another in one vector, whose equal parts the ranks hold.
Under expert parallelism of size E the experts have param groups of their own, of which every E-th rank holds a part.
Stage 3: each parameter is cut into ceil(numel / ranks) elements a rank, the last ones padded, and a rank's cuts lie one
after another in its flat groups. Order and shapes are those of ``param_shapes`` in the model states
(https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/utils/zero_to_fp32.py).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

from ckptflow.tensors import Shape, contiguous_strides
from ckptflow.validate.reread.base import UncoveredError
from ckptflow.validate.reread.torch_stubs import Inert

if TYPE_CHECKING:
    import torch

PARTITIONS, FLAT_GROUPS = "single_partition_of_fp32_groups", "fp32_flat_groups"
EXPERT = re.compile(r"(.*deepspeed_experts\.)(\d+)(\..*)")


class Joined:
    """Flat tensors one after another, which are never put together as a whole.

    Attributes:
        numel: of all of them.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._parts = parts
        self._ends = list(accumulate(part.numel() for part in parts))
        self.numel = self._ends[-1] if parts else 0

    def views(self, begin: int, numel: int) -> Iterator[torch.Tensor]:
        """The elements ``[begin, begin + numel)``."""
        at = bisect_right(self._ends, begin)
        while numel:
            part = self._parts[at]
            low = begin - (self._ends[at] - part.numel())
            view = part[low : low + numel]
            yield view
            at, begin, numel = at + 1, begin + view.numel(), numel - view.numel()

    def box(self, shape: Shape, offsets: Shape, sizes: Shape, base: int = 0) -> torch.Tensor:
        """A copy of a box of the tensor of ``shape`` that begins at element ``base``, row-major; not an empty box."""
        import torch

        strides = contiguous_strides(shape)
        extent = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
        if extent == prod(sizes):
            begin = base + sum(offset * step for offset, step in zip(offsets, strides, strict=True))
            return torch.cat(list(self.views(begin, extent))).reshape(sizes)
        rows = range(offsets[0], offsets[0] + sizes[0])
        return torch.stack([self.box(shape[1:], offsets[1:], sizes[1:], base + row * strides[0]) for row in rows])


@dataclass(frozen=True, slots=True)
class Place:
    """The elements of a tensor: ``[begin, begin + share)`` of each vector, one after another; padding may follow."""

    shape: Shape
    vectors: tuple[Joined, ...]
    begin: int
    share: int


def flat_places(model: Mapping[str, Any], optims: Sequence[Mapping[str, Any]]) -> dict[str, Place]:
    """Where the trained parameters of one model-parallel rank lie; experts under their global numbers.

    Args:
        model: model states.
        optims: ``optimizer_state_dict`` of all data-parallel ranks, in rank order.

    Raises:
        UncoveredError: the vectors don't follow ``param_shapes`` for sure.
    """
    if not model.get("param_shapes"):
        raise UncoveredError("DeepSpeed's model states without param_shapes")
    if is_sharded(optims):
        if any(_counts(optim) != {len(optims)} for optim in optims):
            raise _shared_otherwise(optims)
        return _sharded_places(model, optims)
    _check_order(model, optims)
    return _partitioned_places(model, optims)


def is_sharded(optims: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it is stage 3."""
    return FLAT_GROUPS in optims[0]


def _counts(optim: Mapping[str, Any]) -> set[object]:
    counts = optim.get("partition_count")
    return set(counts if isinstance(counts, (list, tuple)) else [counts])


def _shared_otherwise(optims: Sequence[Mapping[str, Any]]) -> UncoveredError:
    counts = optims[0].get("partition_count")
    return UncoveredError(f"param groups that {counts} of {len(optims)} ranks of DeepSpeed share")


def _check_order(model: Mapping[str, Any], optims: Sequence[Mapping[str, Any]]) -> None:
    """Stages 1 and 2: parameters are in their param group's order, and without padding between them."""
    config = model.get("ds_config")  # a dict, or the path that the trainer was given
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if isinstance(zero, dict) and zero.get("round_robin_gradients"):
        raise UncoveredError("DeepSpeed's round_robin_gradients, which changes the order of parameters")
    if not isinstance(zero, dict) and not all(map(_recorded, optims)):
        raise UncoveredError("DeepSpeed's partitions of which nothing tells the order for sure")
    if any(_any_nonzero(optim.get("param_alignment_paddings")) for optim in optims):
        raise UncoveredError("DeepSpeed's parameters with padding between them")


def _groups(model: Mapping[str, Any]) -> list[dict[str, Shape]]:
    """Shapes of the trained parameters of each param group, in the order of the flat vectors."""
    shapes = model["param_shapes"]
    groups = [shapes] if isinstance(shapes, dict) else shapes  # one dict for all groups before DeepSpeed 0.5
    return [{str(name): tuple(shape) for name, shape in group.items()} for group in groups]


def _vectors(optim: Mapping[str, Any], key: str) -> list[torch.Tensor]:
    import torch

    vectors = optim.get(key)
    if not isinstance(vectors, (list, tuple)) or any(
        not isinstance(vector, torch.Tensor) or vector.dim() != 1 for vector in vectors
    ):
        raise UncoveredError(f"DeepSpeed's optimizer states whose {key} is not a list of flat tensors")
    return [vector.detach() for vector in vectors]


def _sharded_places(model: Mapping[str, Any], optims: Sequence[Mapping[str, Any]]) -> dict[str, Place]:
    """Stage 3."""
    vectors = tuple(Joined(_vectors(optim, FLAT_GROUPS)) for optim in optims)
    places: dict[str, Place] = {}
    begin = 0
    for name, shape in ((name, shape) for group in _groups(model) for name, shape in group.items()):
        share = -(-prod(shape) // len(vectors))
        places[name] = Place(shape, vectors, begin, share)
        begin += share
    if any(vector.numel != begin for vector in vectors):
        raise UncoveredError("DeepSpeed's flat groups that hold more or less than param_shapes says")
    return places


def _partitioned_places(model: Mapping[str, Any], optims: Sequence[Mapping[str, Any]]) -> dict[str, Place]:
    """Stages 1 and 2."""
    groups, ranks = _groups(model), [_vectors(optim, PARTITIONS) for optim in optims]
    if any(len(partitions) != len(groups) for partitions in ranks):
        raise UncoveredError("DeepSpeed's partitions of other param groups than param_shapes says")
    places: dict[str, Place] = {}
    for number, group in enumerate(groups):
        owners = _owners(number, len(groups), optims)
        for part, members in enumerate(owners):
            found = _walk(group, [ranks[rank][number] for rank in members])
            first = 0
            for rank in members:
                _check_starts(_recorded(optims[rank]), number, first, found)
                first += ranks[rank][number].numel()
            places |= found if len(owners) == 1 else _global_experts(part, found)
    return places


def _owners(group: int, groups: int, optims: Sequence[Mapping[str, Any]]) -> list[range]:
    """The ranks that share the vector of a param group, once for each of its vectors."""
    shares = set()
    for optim in optims:
        counts = optim.get("partition_count")
        each = list(counts) if isinstance(counts, (list, tuple)) else [counts] * groups
        shares.add(each[group] if len(each) == groups else None)
    share = shares.pop()
    if shares or type(share) is not int or share < 1 or len(optims) % share:
        raise _shared_otherwise(optims)
    vectors = len(optims) // share
    return [range(part, len(optims), vectors) for part in range(vectors)]


def _walk(group: Mapping[str, Shape], parts: Sequence[torch.Tensor]) -> dict[str, Place]:
    vector = Joined(parts)
    found: dict[str, Place] = {}
    begin = 0
    for name, shape in group.items():
        found[name] = Place(shape, (vector,), begin, prod(shape))
        begin += prod(shape)
    if begin > vector.numel:
        raise UncoveredError("DeepSpeed's partitions that hold less than param_shapes says")
    return found


def _global_experts(part: int, found: Mapping[str, Place]) -> dict[str, Place]:
    """From the numbers that experts have among those of their rank to those among all of their layer."""
    matches = {name: EXPERT.fullmatch(name) for name in found}
    layers = [match[1] for match in matches.values() if match]
    numbers = {layer: {match[2] for match in matches.values() if match and match[1] == layer} for layer in layers}
    renamed: dict[str, Place] = {}
    for name, match in matches.items():
        if match is None:
            raise UncoveredError(f"the parameter {name}, which only some ranks of DeepSpeed share")
        number = int(match[2]) + part * len(numbers[match[1]])
        renamed[f"{match[1]}{number}{match[3]}"] = found[name]
    return renamed


def _recorded(optim: Mapping[str, Any]) -> list[dict[str, int]]:
    """For each param group, where the parameters begin in a rank's partition, as it recorded them; empty if it didn't.

    Parameters that the partition holds no element of are not in it.
    """
    groups = optim.get("param_slice_mappings")
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, dict) for group in groups):
        return []
    addresses = [
        {name: address.state for name, address in group.items() if isinstance(address, Inert)} for group in groups
    ]
    return [{name: state["start"] for name, state in group.items() if state["numel"]} for group in addresses]


def _check_starts(recorded: Sequence[Mapping[str, int]], group: int, first: int, places: Mapping[str, Place]) -> None:
    """The walk over ``param_shapes`` puts the parameters of a group where the rank recorded them.

    Args:
        recorded: by the rank; for no group or for all.
        group: which param group.
        first: place of the rank's partition in the vector of the group.
        places: of the parameters of the group.
    """
    for name, start in (recorded[group] if len(recorded) > group else {}).items():
        if name not in places or start != max(places[name].begin - first, 0):
            raise UncoveredError("DeepSpeed's partitions in another order than that of param_shapes")


def _any_nonzero(value: object) -> bool:
    return any(map(_any_nonzero, value)) if isinstance(value, (list, tuple)) else bool(value)
