"""Tensors of torchtitan's, torchtune's and litgpt's models under transformers' names, found by numbering rows.

Which rows of a fused or interleaved matrix make up a tensor of transformers is told by numbering all of them and moving
these numbers with ``view``, ``transpose`` and ``tensor_split``, as the code bases' own importers do with the values.
Of the tables of ``transforms.code_bases`` it takes the names of the tensors that one of transformers' is made of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ckptflow.tensors import Shape
from ckptflow.validate.reread.base import Rereader

if TYPE_CHECKING:
    import torch

# Models whose rotary pairs lie side by side, in these projections.
PAIRED = frozenset({"llama", "mistral", "gemma"})
PAIRED_NAME = re.compile(r"(?:attention\.(?:qkv_linear\.)?w[qk]|attn\.[qk]_proj)\.weight$")
FUSED_NAME = re.compile(r"\.attn\.(qkv|attn)\.(?:weight|bias)$")
EXPERT = re.compile(r"\.experts\.(\d+)\.\w+\.weight$")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor's rows are: ``rows[i]`` counts through all rows of ``sources``, one after another."""

    sources: tuple[str, ...]
    starts: tuple[int, ...]
    rows: torch.Tensor
    rest: Shape
    expert: int | None = None


class CodeBaseRereader:
    """What another reader gives, and by the names of ``name_for`` tensors whose rows lie elsewhere.

    Args:
        inner: the reader of the files.
        config: the content of config.json.
    """

    def __init__(self, inner: Rereader, config: Mapping[str, Any]) -> None:
        self._inner = inner
        self._config = config
        self._places: dict[str, _Place] = {}
        self.how = inner.how

    def name_for(self, sources: Sequence[str], fqn: str) -> str | None:
        """A name for the tensor that transformers calls ``fqn``, made of ``sources``; None where it can't be told."""
        shapes = [self._inner.shape(source) for source in sources]
        place = self._place(tuple(sources), [shape for shape in shapes if shape], fqn) if all(shapes) else None
        if place is None:
            return None
        name = f"{fqn} out of {', '.join(sources)}"
        self._places[name] = place
        return name

    def shape(self, fqn: str) -> Shape | None:
        """Global shape; None where there is no such tensor."""
        place = self._places.get(fqn)
        return self._inner.shape(fqn) if place is None else (len(place.rows), *place.rest)

    def read(self, fqn: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        """The box ``[offsets, offsets + sizes)``, in the dtype of the checkpoint. Reads at most twice as many rows."""
        place = self._places.get(fqn)
        if place is None:
            return self._inner.read(fqn, offsets, sizes)
        return self._gather(place, place.rows[offsets[0] : offsets[0] + sizes[0]], offsets[1:], sizes[1:])

    def _gather(self, place: _Place, rows: torch.Tensor, offsets: Shape, sizes: Shape) -> torch.Tensor:
        import torch

        low, high = int(rows.min()), int(rows.max())
        part = max(number for number, start in enumerate(place.starts) if start <= low)
        ends = place.starts[part + 1] if part + 1 < len(place.starts) else high + 1
        if high >= ends or high - low >= 2 * len(rows):
            half = len(rows) // 2
            return torch.cat(
                [self._gather(place, rows[:half], offsets, sizes), self._gather(place, rows[half:], offsets, sizes)]
            )
        at, count = low - place.starts[part], high - low + 1
        if place.expert is not None:
            return self._inner.read(place.sources[part], (place.expert, at, *offsets), (1, count, *sizes))[0]
        return self._inner.read(place.sources[part], (at, *offsets), (count, *sizes))[rows - low]

    def _place(self, sources: tuple[str, ...], shapes: list[Shape], fqn: str) -> _Place | None:
        import torch

        expert = EXPERT.search(fqn)
        if expert is not None and len(sources) == 1 and len(shapes[0]) == 3:
            return _Place(sources, (0,), torch.arange(shapes[0][1]), shapes[0][2:], int(expert[1]))
        starts = tuple(accumulate((shape[0] for shape in shapes), initial=0))
        rows = self._rows(sources[0], starts[-1], fqn)
        return None if rows is None else _Place(sources, starts[:-1], rows, shapes[0][1:])

    def _rows(self, source: str, count: int, fqn: str) -> torch.Tensor | None:
        """The numbers of ``count`` rows in the order that transformers has them, of its tensor alone."""
        import torch

        heads = self._config.get("num_attention_heads")
        hidden = self._config.get("hidden_size")
        if type(heads) is not int or type(hidden) is not int:
            return None
        groups = self._config.get("num_key_value_heads") or heads
        head = self._config.get("head_dim") or hidden // heads
        numbers = torch.arange(count)
        fused = FUSED_NAME.search(source)
        if fused is None:
            if PAIRED_NAME.search(source) is None or self._config.get("model_type") not in PAIRED:
                return numbers
            return None if count % head else numbers.view(-1, head // 2, 2).transpose(1, 2).reshape(-1)
        if count != (heads + 2 * groups) * head:
            return None
        if fused[1] == "attn":
            each = heads // groups
            grouped = numbers.view(groups, each + 2, head)
            parts = [part.reshape(-1) for part in grouped.tensor_split((each, each + 1), dim=1)]
        else:
            parts = list(numbers.tensor_split((heads * head, (heads + groups) * head)))
        for letter, part in zip("qkv", parts, strict=True):
            if f".{letter}_proj." in fqn:
                return part
        if "query_key_value" in fqn:
            return torch.cat([part.view(groups, -1, head) for part in parts], dim=1).reshape(-1)
        return torch.cat(parts)
