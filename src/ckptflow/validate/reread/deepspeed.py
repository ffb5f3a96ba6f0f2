"""DeepSpeed's checkpoints through ``torch.load``: ZeRO 0 to 3, universal, experts, pipelines and tensor parallelism."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptflow.tensors import Shape
from ckptflow.validate.reread.base import Rereader, UncoveredError, window_of
from ckptflow.validate.reread.deepspeed_cut import CutRereader
from ckptflow.validate.reread.deepspeed_flat import Joined, Place, flat_places, is_sharded
from ckptflow.validate.reread.torch_stubs import load_deepspeed_file, load_universal_file

if TYPE_CHECKING:
    import torch

MODEL_FILE = re.compile(r"(?:(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIM_FILE = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
LAYER_FILE = re.compile(r"layer_(\d+)-model_states\.pt")
EXPERT_FILE = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
UNIVERSAL_FILE = "fp32.pt"
# Of an optimizer that keeps masters without ZeRO, and without names.
NAMELESS = ("fp32_groups", "fp32_groups_flat")

Tensors = dict[str, "torch.Tensor"]


def reread_deepspeed(files: Sequence[Path], config_dir: Path | None) -> Rereader:
    """The second reader of one tag.

    Args:
        files: all files of states of the tag, and ``fp32.pt`` of a universal one.
        config_dir: directory with the model's config.json, which tells how tensors are cut; None where there is none.

    Raises:
        UncoveredError: vectors whose order is not sure, masters without names, and what is cut in ways of its own.
        pickle.UnpicklingError, RuntimeError: torch refuses a file.
    """
    found = _Files(files)
    if found.universal:
        return _universal(found)
    whole = _experts(found.experts)
    if found.layers:
        whole |= {f"{layer}.{name}": tensor for layer, path in found.layers.items() for name, tensor in _load(path)}
        stages = [_open_rank(found.models[mp], found.optims[mp], whole) for mp in sorted(found.models)]
        return StatesRereader(
            {name: place for stage in stages for name, place in stage.places.items()},
            whole,
            {alias: owner for stage in stages for alias, owner in stage.owners.items()},
        )
    ranks = [_open_rank(found.models[mp], found.optims[mp], whole) for mp in sorted(found.models)]
    if len(ranks) == 1:
        return ranks[0]
    if whole or config_dir is None:
        raise UncoveredError("experts on several of DeepSpeed's model-parallel ranks" if whole else "no config.json")
    model = load_deepspeed_file(found.models[0][0])
    return CutRereader(ranks, model.get("universal_checkpoint_info"), config_dir)


class StatesRereader:
    """Parameters in flat vectors, and tensors that are whole; loaded by torch with mapped storages.

    Args:
        places: of trained parameters.
        whole: of those with a place, copies in the compute dtype.
        owners: alias → owner of shared parameters.
    """

    how = "torch.load of every rank's states, flat fp32 vectors taken apart as zero_to_fp32.py does"

    def __init__(self, places: Mapping[str, Place], whole: Mapping[str, torch.Tensor], owners: Mapping[str, str]):
        self.places, self.whole, self.owners = places, whole, owners
        self._joined = lru_cache(maxsize=4)(self._join)

    def shape(self, fqn: str) -> Shape | None:
        name = self._owner(fqn)
        if name in self.places:
            return self.places[name].shape
        return tuple(self.whole[name].shape) if name in self.whole else None

    def read(self, fqn: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        name = self._owner(fqn)
        if name in self.places:
            return self._joined(name).box(self.places[name].shape, offsets, sizes)
        return self.whole[name][window_of(offsets, sizes)]

    def _owner(self, fqn: str) -> str:
        return fqn if fqn in self.places else self.owners.get(fqn, fqn)

    def _join(self, name: str) -> Joined:
        place = self.places[name]
        return Joined([view for vector in place.vectors for view in vector.views(place.begin, place.share)])


class _Files:
    """The files of one tag by their names.

    Attributes:
        models: model-parallel rank → model states in the order of data-parallel ranks, or the ones that all share.
        optims: model-parallel rank → optimizer states in that order.
        layers: number of a pipeline's layer → its weights.
        experts: of all layers.
        universal: parameter → its file.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        models: dict[int, dict[int, Path]] = defaultdict(dict)
        optims: dict[int, dict[int, Path]] = defaultdict(dict)
        self.layers: dict[int, Path] = {}
        self.experts: list[Path] = []
        self.universal: dict[str, Path] = {}
        for path in files:
            if match := OPTIM_FILE.fullmatch(path.name):
                optims[int(match[2])][int(match[1])] = path
            elif match := MODEL_FILE.fullmatch(path.name):
                models[int(match[2])][int(match[1] or 0)] = path
            elif match := LAYER_FILE.fullmatch(path.name):
                self.layers[int(match[1])] = path
            elif EXPERT_FILE.fullmatch(path.name):
                self.experts.append(path)
            elif path.name == UNIVERSAL_FILE:
                self.universal[path.parent.name] = path
            else:
                raise UncoveredError(f"DeepSpeed's {path.name}")
        for kind, ranks in ("model", models), ("optim", optims):
            for mp, found in ranks.items():
                if sorted(found) != list(range(len(found))) or mp not in models:
                    raise UncoveredError(f"ranks {sorted(found)[:8]} of DeepSpeed's {kind} states")
        self.models = {mp: [found[rank] for rank in sorted(found)] for mp, found in models.items()}
        self.optims = defaultdict(list, {mp: [found[rank] for rank in sorted(found)] for mp, found in optims.items()})


def _open_rank(model_files: Sequence[Path], optim_files: Sequence[Path], experts: Tensors) -> StatesRereader:
    """What one model-parallel rank holds."""
    model = load_deepspeed_file(model_files[0])
    whole = experts | _tensors(model.get("module"))
    owners = dict(model.get("shared_params") or {})
    if not optim_files:
        _check_no_masters(model, whole)
        return StatesRereader({}, whole, owners)
    optims = [load_deepspeed_file(path)["optimizer_state_dict"] for path in optim_files]
    sharded = is_sharded(optims)
    if len(model_files) != (len(optims) if sharded else 1):
        raise UncoveredError(f"{len(model_files)} model states and {len(optims)} optimizer states of DeepSpeed")
    places = flat_places(model, optims)
    if sharded:
        places |= _frozen_places(model, model_files[1:])
    else:
        whole |= _tensors(model.get("frozen_param_fragments"))
    return StatesRereader(places, whole, owners)


def _check_no_masters(model: Mapping[str, Any], whole: Tensors) -> None:
    """Without ZeRO the weights are whole, and trained as they are: there may be masters beside those of 16 bits."""
    import torch

    optimizer = model.get("optimizer")
    if isinstance(optimizer, dict):
        nameless = any(optimizer.get(key) for key in NAMELESS)
    else:
        nameless = any(t.is_floating_point() and t.dtype != torch.float32 for t in whole.values())
    if nameless:
        raise UncoveredError("DeepSpeed's masters without ZeRO, which have no names")


def _experts(files: Sequence[Path]) -> Tensors:
    return {name: tensor for path in files for name, tensor in _load(path)}


def _load(path: Path) -> list[tuple[str, torch.Tensor]]:
    return list(_tensors(load_deepspeed_file(path)).items())


def _universal(found: _Files) -> StatesRereader:
    """One file for each parameter; from ZeRO 3 they are flat, and the model states tell the shapes."""
    files = [path for paths in found.models.values() for path in paths]
    models = [load_deepspeed_file(path) for path in files]
    shapes = {
        name: tuple(shape)
        for model in models
        for group in _as_list(model.get("param_shapes"))
        for name, shape in group.items()
    }
    whole: Tensors = {} if len(found.models) > 1 else _tensors(models[0].get("module"))
    for name, path in found.universal.items():
        tensor = load_universal_file(path)
        whole[name] = tensor.view(shapes[name]) if tensor.dim() == 1 and name in shapes else tensor
    frozen = _frozen_places(models[0], files[1:]) if len(found.models) == 1 else {}
    owners = {alias: owner for model in models for alias, owner in (model.get("shared_params") or {}).items()}
    return StatesRereader({name: place for name, place in frozen.items() if name not in whole}, whole, owners)


def _as_list(shapes: object) -> list[Any]:
    return list(shapes) if isinstance(shapes, (list, tuple)) else [shapes] if isinstance(shapes, dict) else []


def _tensors(values: object) -> Tensors:
    import torch

    items = values.items() if isinstance(values, Mapping) else ()
    found = {name: value.detach() for name, value in items if isinstance(value, torch.Tensor)}
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
