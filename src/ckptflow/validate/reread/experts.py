"""Experts that a checkpoint holds stacked, taken apart as ``torch.unbind`` and ``torch.chunk`` would."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ckptflow.tensors import Shape
from ckptflow.validate.reread.base import Rereader

if TYPE_CHECKING:
    import torch

# Which half of a stack of gates and ups an expert's weight is; any other stack holds one weight of each expert.
_PARTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 0, "w2": 0}
_EXPERT = re.compile(rf"\.experts\.(\d+)\.({'|'.join(_PARTS)})\.weight$")
_PLACE = re.compile(r"(.*)\[(\d+)\]\[(\d)/(\d)\]$")


class _Place(NamedTuple):
    stack: str
    expert: int
    part: int
    parts: int


def name_in_stack(stack: str, fqn: str) -> str | None:
    """A name for one expert's weight inside the stacked tensor, for ``ExpertsRereader``; None if it is none."""
    found = _EXPERT.search(fqn)
    if found is None or ".experts." not in stack:
        return None
    part = f"{_PARTS[found[2]]}/2" if stack.endswith("gate_up_proj") else "0/1"
    return f"{stack}[{found[1]}][{part}]"


class ExpertsRereader:
    """What another reader gives, and by the names of ``name_in_stack`` [rows, columns] of single experts."""

    def __init__(self, inner: Rereader) -> None:
        self._inner = inner
        self.how = inner.how

    def shape(self, fqn: str) -> Shape | None:
        """Global shape; None where the other reader has no such tensor."""
        place = _place(fqn)
        if place is None:
            return self._inner.shape(fqn)
        stacked = self._inner.shape(place.stack)
        if stacked is None or len(stacked) != 3 or place.expert >= stacked[0] or stacked[1] % place.parts:
            return None
        return stacked[1] // place.parts, stacked[2]

    def read(self, fqn: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        """The box ``[offsets, offsets + sizes)``, in the dtype of the checkpoint."""
        place, shape = _place(fqn), self.shape(fqn)
        if place is None or shape is None:
            return self._inner.read(fqn, offsets, sizes)
        row = place.part * shape[0] + offsets[0]
        return self._inner.read(place.stack, (place.expert, row, offsets[1]), (1, *sizes))[0]


def _place(fqn: str) -> _Place | None:
    found = _PLACE.match(fqn)
    return None if found is None else _Place(found[1], int(found[2]), int(found[3]), int(found[4]))
