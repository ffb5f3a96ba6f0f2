"""What the ranks of Megatron's legacy format hold together: rank files by ``torch.load``, joined by row numbers.

Where a rank's rows belong is told by numbering the rows of the whole tensor and cutting the numbers as Megatron cuts
the weights: in a row for all tensors but ``linear_fc1``, whose halves, gate and up, are cut one by one
(https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/mlp.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptflow.formats.megatron_states import OLD_STYLE, RENAMES
from ckptflow.manifest import Mesh
from ckptflow.tensors import Shape
from ckptflow.transforms.megatron_names import MegatronModel, describe
from ckptflow.validate.reread.base import UncoveredError, window_of
from ckptflow.validate.reread.torch_file import named_tensors
from ckptflow.validate.reread.torch_stubs import load_with_stubs

if TYPE_CHECKING:
    import torch

CHUNK = re.compile(r"model\d*")
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
# An expert's weight in its own tensor, or those of all the rank's experts in one.
EXPERT = re.compile(r"(\.mlp\.experts\.)(?:local_experts\.(\d+)\.(.+)|(linear_fc[12]\.\w+?)(\d+))$")
GROUPED = re.compile(r"(\.mlp\.experts\.)weight([12])$")

Tensors = Mapping[str, "torch.Tensor"]


class MegatronRanks:
    """Tensors under Megatron-Core's names, layers and experts numbered through all ranks.

    Args:
        files: every rank's ``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``.
        mesh: the grid of ranks.
        config: transformers' config.json.

    Raises:
        pickle.UnpicklingError, RuntimeError: torch refuses a file.
        UncoveredError: a rank's part is of a shape that does not tell how the whole was cut.
        UnsupportedCheckpointError: no table for this ``model_type``.
    """

    def __init__(self, files: Sequence[Path], mesh: Mesh, config: Mapping[str, Any]) -> None:
        sizes = dict(zip(mesh.dim_names or ("tp",), mesh.shape, strict=True))
        self._tp, self._pp, self._ep = (sizes.get(dim, 1) for dim in ("tp", "pp", "ep"))
        loaded = {self._rank(path): _chunks(path) for path in files}
        outputs = [c["output_layer.weight"] for cs in loaded.values() for c in cs if "output_layer.weight" in c]
        self.model = describe(config, len(outputs[0]) * self._tp if outputs else None)
        self._wanted = {name: wanted for wanted in self.model.wanted for name in wanted.megatron}
        self._parts: dict[str, list[torch.Tensor]] = {}
        self._collect(loaded, self.model)
        self._cut = {key: self._find_cut(key) for key in self._parts}
        self._rows = lru_cache(maxsize=64)(self._number_rows)

    def _rank(self, path: Path) -> tuple[int, int, int]:
        """Tensor-, pipeline- and expert-parallel rank; names of directories count those of which there are several."""
        numbers = [int(number) for number in path.parent.name.removeprefix("mp_rank_").split("_")]
        tp = numbers.pop(0)
        pp = numbers.pop(0) if self._pp > 1 else 0
        return tp, pp, numbers.pop(0) if self._ep > 1 else 0

    def _collect(self, loaded: Mapping[tuple[int, int, int], Sequence[Tensors]], model: MegatronModel) -> None:
        """Parts of all tensor-parallel ranks by global name; of replicas elsewhere the first one counts."""
        first = 0
        for chunk in range(len(loaded[0, 0, 0])):
            for pp in range(self._pp):
                layers = {int(m[1]) for name in loaded[0, pp, 0][chunk] if (m := LAYER.match(name))}
                for ep in range(self._ep):
                    experts = model.dims["experts"] // self._ep
                    ranks = [dict(_numbered(loaded[tp, pp, ep][chunk], first, ep, experts)) for tp in range(self._tp)]
                    for name in ranks[0]:
                        self._parts.setdefault(name, [rank[name] for rank in ranks])
                first += len(layers)

    def stored_shape(self, key: str) -> Shape | None:
        """Shape of the whole tensor, vocabulary padding included; None where no rank has it."""
        if key not in self._parts:
            return None
        part, dim = self._parts[key][0], self._cut[key]
        return tuple(n * self._tp if d == dim else n for d, n in enumerate(part.shape))

    def read_stored(self, key: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        """The box ``[offsets, offsets + sizes)`` of the whole tensor."""
        import torch

        dim, parts = self._cut[key], self._parts[key]
        if dim is None:
            return parts[0][window_of(offsets, sizes)]
        box = torch.empty(sizes, dtype=parts[0].dtype)
        for part, numbers in zip(parts, self._rows(key), strict=True):
            inside = ((numbers >= offsets[dim]) & (numbers < offsets[dim] + sizes[dim])).nonzero().flatten()
            others = [slice(None) if d == dim else w for d, w in enumerate(window_of(offsets, sizes))]
            box.index_copy_(dim, numbers[inside] - offsets[dim], part[tuple(others)].index_select(dim, inside))
        return box

    def _find_cut(self, key: str) -> int | None:
        """The dim that tensor parallelism cuts; None where each rank holds the whole."""
        wanted, shape = self._wanted.get(key), tuple(self._parts[key][0].shape)
        if wanted is None or self._tp == 1 or (shape == wanted.shape and wanted.kind != "vocab"):
            return None
        if wanted.kind == "vocab":
            return 0  # its rows are padded, so that the config doesn't tell their number
        cut = [d for d, (local, whole) in enumerate(zip(shape, wanted.shape, strict=True)) if local * self._tp == whole]
        if len(cut) != 1:
            raise UncoveredError(f"{key}, of which a rank holds {list(shape)} of {list(wanted.shape)}")
        return cut[0]

    def _number_rows(self, key: str) -> list[torch.Tensor]:
        """For each tensor-parallel rank the numbers of its rows in the whole tensor, along the dim that is cut."""
        import torch

        shape, dim = self.stored_shape(key), self._cut[key]
        if shape is None or dim is None:
            raise KeyError(key)
        numbers = torch.arange(shape[dim])
        if self._wanted[key].kind == "gate_up":
            gates, ups = (half.chunk(self._tp) for half in numbers.chunk(2))
            return [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        return list(numbers.chunk(self._tp))


def _chunks(path: Path) -> list[dict[str, torch.Tensor]]:
    """Dotted Megatron-Core name with local numbers → tensor, for each virtual pipeline stage."""
    state = load_with_stubs(path)
    names = sorted((name for name in state if CHUNK.fullmatch(name)), key=lambda name: int(name[5:] or 0))
    return [_core_names(dict(named_tensors("", state[name]))) for name in names]


def _core_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if not any(name.startswith(OLD_STYLE) for name in tensors):
        return tensors
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, replacement in RENAMES:
            name = pattern.sub(replacement, name)
        renamed[name] = tensor
    return renamed


def _numbered(tensors: Tensors, first_layer: int, ep: int, experts: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A rank's tensors under global numbers of layers and experts."""
    for local, tensor in tensors.items():
        name = LAYER.sub(lambda m: f"decoder.layers.{int(m[1]) + first_layer}.", local)
        found, grouped = EXPERT.search(name), GROUPED.search(name)
        if found:
            number, rest = (found[2], found[3]) if found[2] else (found[5], found[4])
            yield f"{name[: found.end(1)]}local_experts.{ep * experts + int(number)}.{rest}", tensor
        elif grouped:
            # [hidden, experts · ffn] and [experts · ffn, hidden] in memory, [experts, in, out] in use.
            split = (experts, len(tensor), -1) if grouped[2] == "1" else (experts, -1, tensor.shape[-1])
            for number, weight in enumerate(tensor.view(split).transpose(1, 2)):
                at = f"{name[: grouped.end(1)]}local_experts.{ep * experts + number}"
                yield f"{at}.linear_fc{grouped[2]}.weight", weight
        else:
            yield name, tensor
