"""Megatron-Core's tensors under transformers' names: the rows of a tensor are found by cutting row numbers.

Which rows of Megatron's fused matrix are k, say, is told by numbering all of its rows and taking these numbers apart
with ``view`` and ``narrow``, as Megatron's own ``split`` does with the values
(https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/attention.py). Names come from the tables of
model families, the values from the second reader of DCP, or of the ranks' files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ckptflow.manifest import Mesh
from ckptflow.tensors import Shape
from ckptflow.transforms.megatron_names import MegatronModel, Wanted, describe
from ckptflow.validate.reread.dcp import DcpRereader
from ckptflow.validate.reread.megatron_ranks import MegatronRanks

if TYPE_CHECKING:
    import torch

LAYER = re.compile(r"(decoder\.layers)\.(\d+)\.")
EXPERT = re.compile(r"(mlp\.experts)\.local_experts\.(\d+)\.")


# NeMo saves the model inside its wrapper.
WRAPPER, EMBEDDING = "module.", "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Where one key of DCP has rows of a Megatron tensor: behind the numbers of layer and expert on its first axes."""

    key: str
    stack: Shape
    rows: int


class Stored(Protocol):
    """Tensors under Megatron's names."""

    def stored_shape(self, key: str) -> Shape | None:
        """Global shape; None where there is no such tensor."""
        ...

    def read_stored(self, key: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        """The box ``[offsets, offsets + sizes)`` of a global tensor."""
        ...


class MegatronRereader:
    """The tensors that transformers' model has.

    Args:
        stored: the DCP directory or the ranks, under Megatron's names.
        model: what config.json says about them.
        files: which files ``stored`` is made of, for people.
        wrapper: what all of Megatron's names begin with.
    """

    def __init__(self, stored: Stored, model: MegatronModel, files: str, wrapper: str = "") -> None:
        self.how = f"torch.load of every {files}, rows found by cutting row numbers"
        self._stored = stored
        self._wrapper = wrapper
        self._dims = model.dims
        self._places = {hf: (wanted, part) for wanted in model.wanted for part, hf in enumerate(wanted.hf)}
        self._find = lru_cache(maxsize=256)(self._find_rows)
        self._rows = lru_cache(maxsize=16)(self._number_rows)

    def shape(self, fqn: str) -> Shape | None:
        if fqn not in self._places:
            return None
        wanted, part = self._places[fqn]
        if not self._find(wanted):
            return None
        return (len(self._rows(wanted, part)), *wanted.shape[1:])

    def read(self, fqn: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        import torch

        wanted, part = self._places[fqn]
        rows = self._rows(wanted, part)[offsets[0] : offsets[0] + sizes[0]]
        ends = (rows.diff() != 1).nonzero().flatten() + 1
        runs = [(int(run[0]), len(run)) for run in rows.tensor_split(ends.tolist())]
        return torch.cat([box for run in runs for box in self._run(wanted, *run, offsets[1:], sizes[1:])])

    def _run(self, wanted: Wanted, first: int, count: int, offsets: Shape, sizes: Shape) -> Iterator[torch.Tensor]:
        """Neighbouring rows, out of one key or two."""
        begin = 0
        for stored in self._find(wanted):
            low, high = max(first, begin), min(first + count, begin + stored.rows)
            if low < high:
                at, extent = (*stored.stack, low - begin, *offsets), (*(1 for _ in stored.stack), high - low, *sizes)
                yield self._stored.read_stored(stored.key, at, extent).reshape(high - low, *sizes)
            begin += stored.rows

    def _number_rows(self, wanted: Wanted, part: int) -> torch.Tensor:
        """Numbers of the rows of Megatron's tensor that are the ``part``-th of transformers'."""
        import torch

        numbers = torch.arange(wanted.shape[0])
        if wanted.kind == "gate_up":
            return numbers.chunk(2)[part]
        if wanted.kind == "qkv":
            groups, head = self._dims["kv_heads"], self._dims["head"]
            queries = self._dims["heads"] // groups * head
            begins = (0, queries, queries + head)
            return numbers.view(groups, -1).narrow(1, begins[part], queries if part == 0 else head).flatten()
        return numbers

    def _find_rows(self, wanted: Wanted) -> tuple[StoredRows, ...]:
        """The key that holds the tensor, or the two that hold its halves; none where it can't be read here."""
        for name in wanted.megatron:
            for key, stack in _keys(name):
                key = self._wrapper + key
                for keys in ((key,), (f"{key}_w", f"{key}_v")):
                    shapes = [self._stored.stored_shape(key) for key in keys]
                    if all(shapes):
                        return tuple(
                            StoredRows(key, stack, shape[len(stack)])
                            for key, shape in zip(keys, shapes, strict=True)
                            if shape is not None
                        )
        return ()


def reread_torch_dist(stored: DcpRereader, config: Mapping[str, Any]) -> MegatronRereader:
    """The second reader of a ``torch_dist`` directory.

    Raises:
        UnsupportedCheckpointError: no table for this ``model_type``.
    """
    wrapper = "" if stored.stored_shape(EMBEDDING) else WRAPPER
    output = stored.stored_shape(f"{wrapper}output_layer.weight")
    return MegatronRereader(stored, describe(config, output[0] if output else None), "DCP entry", wrapper)


def reread_ranks(files: Sequence[Path], mesh: Mesh, config: Mapping[str, Any]) -> MegatronRereader:
    """The second reader of the legacy format; arguments and errors as for ``MegatronRanks``."""
    ranks = MegatronRanks(files, mesh, config)
    return MegatronRereader(ranks, ranks.model, "rank's file")


def _keys(name: str) -> list[tuple[str, Shape]]:
    """Keys under which Megatron may have saved a tensor, and its place on the axes that count layers and experts."""
    found: list[tuple[str, Shape]] = [(name, ())]
    for numbered, written, stacked in ((LAYER, r"\1.\2.", r"\1."), (EXPERT, r"\1.experts.\2.", r"\1.experts.")):
        match = numbered.search(name)
        if match is not None:
            ways = ((written, ()), (stacked, (int(match.group(2)),)))
            found += [(numbered.sub(how, key), (*stack, *at)) for key, stack in found for how, at in ways]
    return found
