"""DeepSpeed's ZeRO 1, 2 and 3, taken out of the flat fp32 vectors as DeepSpeed's own zero_to_fp32.py does it.

Stages 1 and 2: the parameters of a param group lie one after another in one vector, whose equal parts the ranks hold.
Stage 3: each parameter is cut into ceil(numel / ranks) elements a rank, the last ones padded, and a rank's cuts lie one
after another in its flat groups. Order and shapes are those of ``param_shapes`` in the model states
(https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/utils/zero_to_fp32.py).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptflow.tensors import Shape, contiguous_strides
from ckptflow.validate.reread.base import UncoveredError
from ckptflow.validate.reread.torch_stubs import Inert, load_deepspeed_file

if TYPE_CHECKING:
    import torch

RANK_FILE = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_00_?(model|optim)_states\.pt")
SHARED_MODEL_FILE = "mp_rank_00_model_states.pt"
PARTITIONS, FLAT_GROUPS = "single_partition_of_fp32_groups", "fp32_flat_groups"


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


class DeepSpeedRereader:
    """The model and optimizer states of one tag, loaded by torch with mapped storages.

    Args:
        files: ``*_states.pt`` of all ranks.

    Raises:
        UncoveredError: more than one model-parallel rank, experts, pipelines, ZeRO 0, universal checkpoints, or flat
            vectors that don't follow ``param_shapes`` for sure.
        pickle.UnpicklingError, RuntimeError: torch refuses a file.
    """

    how = "torch.load of every rank's states, flat fp32 vectors taken apart as zero_to_fp32.py does"

    def __init__(self, files: Sequence[Path]) -> None:
        model_files, optim_files = _by_rank(files)
        model = load_deepspeed_file(model_files[0])
        optims = [load_deepspeed_file(path)["optimizer_state_dict"] for path in optim_files]
        sharded = FLAT_GROUPS in optims[0]
        if len(model_files) != (len(optims) if sharded else 1):
            raise UncoveredError(f"{len(model_files)} model states and {len(optims)} optimizer states of DeepSpeed")
        _check_covered(model, optims, sharded)
        self._places = _sharded_places(model, optims) if sharded else _partitioned_places(model, optims)
        self._owners: dict[str, str] = dict(model.get("shared_params") or {})
        # Of trained parameters, `module` holds copies in the compute dtype (none under stage 3).
        self._whole = _tensors(model["module"])
        if sharded:
            self._places |= _frozen_places(model, model_files[1:])
        else:
            self._whole |= _tensors(model.get("frozen_param_fragments") or {})
        self._joined = lru_cache(maxsize=4)(self._join)

    def shape(self, fqn: str) -> Shape | None:
        name = self._owner(fqn)
        if name in self._places:
            return self._places[name].shape
        return tuple(self._whole[name].shape) if name in self._whole else None

    def read(self, fqn: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        name = self._owner(fqn)
        if name in self._places:
            return self._joined(name).box(self._places[name].shape, offsets, sizes)
        window = tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))
        return self._whole[name][window]

    def _owner(self, fqn: str) -> str:
        return fqn if fqn in self._places else self._owners.get(fqn, fqn)

    def _join(self, name: str) -> Joined:
        place = self._places[name]
        return Joined([view for vector in place.vectors for view in vector.views(place.begin, place.share)])


def _by_rank(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Model states and optimizer states, each in rank order."""
    paths: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
    for path in files:
        match = RANK_FILE.fullmatch(path.name)
        if match is None and path.name != SHARED_MODEL_FILE:
            raise UncoveredError(f"DeepSpeed's {path.name} (only for ZeRO 1 to 3 of one model-parallel rank)")
        kind, rank = (match.group(2), int(match.group(1))) if match else ("model", 0)
        paths[kind][rank] = path
    if not paths["optim"]:
        raise UncoveredError("DeepSpeed's ZeRO 0")
    for kind, found in paths.items():
        if not found or sorted(found) != list(range(len(found))):
            raise UncoveredError(f"ranks {sorted(found)[:8]} of DeepSpeed's {kind} states")
    models, optims = ([found[rank] for rank in sorted(found)] for found in paths.values())
    return models, optims


def _check_covered(model: Mapping[str, Any], optims: Sequence[Mapping[str, Any]], sharded: bool) -> None:
    ranks = len(optims)
    if model.get("num_experts"):
        raise UncoveredError("DeepSpeed's experts")
    if not isinstance(model.get("module"), dict):
        raise UncoveredError("DeepSpeed's pipelines")
    if not model.get("param_shapes"):
        raise UncoveredError("DeepSpeed's model states without param_shapes")
    for optim in optims:
        counts = optim.get("partition_count")
        if set(counts if isinstance(counts, (list, tuple)) else [counts]) != {ranks}:
            raise UncoveredError(f"param groups that {counts} of {ranks} ranks of DeepSpeed share")
    if not sharded:
        _check_order(model, optims)


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
        vector = Joined([rank[number] for rank in ranks])
        found: dict[str, Place] = {}
        begin = 0
        for name, shape in group.items():
            found[name] = Place(shape, (vector,), begin, prod(shape))
            begin += prod(shape)
        if begin > vector.numel:
            raise UncoveredError("DeepSpeed's partitions that hold less than param_shapes says")
        first = 0
        for optim, rank in zip(optims, ranks, strict=True):
            _check_starts(_recorded(optim), number, first, found)
            first += rank[number].numel()
        places |= found
    return places


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


def _tensors(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    import torch

    found = {name: value.detach() for name, value in values.items() if isinstance(value, torch.Tensor)}
    return {name: tensor for name, tensor in found.items() if tensor.numel()}


def _frozen_places(model: Mapping[str, Any], others: Sequence[Path]) -> dict[str, Place]:
    """Frozen parameters under stage 3, of which each rank's model states hold ceil(numel / ranks) elements.

    Args:
        model: model states of rank 0.
        others: files of the other ranks, which hold nothing else that is needed.
    """
    shapes = model.get("frozen_param_shapes") or {}
    states = [model, *map(load_deepspeed_file, others if shapes else ())]
    fragments = [_tensors(state.get("frozen_param_fragments") or {}) for state in states]
    places: dict[str, Place] = {}
    for name, shape in shapes.items():
        vector = Joined([found[name].flatten() for found in fragments if name in found])
        if vector.numel < prod(shape):
            raise UncoveredError("DeepSpeed's frozen parameters without all of their fragments")
        places[name] = Place(tuple(shape), (vector,), 0, prod(shape))
    return places
