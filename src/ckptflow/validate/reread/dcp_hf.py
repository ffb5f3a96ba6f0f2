"""Slices that DCP's Hugging Face storage writer left in safetensors files, through the safetensors library."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckptflow.tensors import Shape
from ckptflow.validate.reread.base import put_together
from ckptflow.validate.reread.huggingface import HuggingFaceRereader

if TYPE_CHECKING:
    import torch

SHARDING_INFO = "DCP_SHARDING_INFO"


class DcpHuggingFaceRereader:
    """All tensors of the shard files, whose global shapes are where their slices end."""

    how = "the safetensors library, slices placed by the offsets beside them"

    def __init__(self, files: Sequence[Path]) -> None:
        self._parts: dict[str, list[tuple[Shape, Shape, Callable[[Shape, Shape], torch.Tensor]]]] = defaultdict(list)
        for path in files:
            reader = HuggingFaceRereader([path])
            info = json.loads(reader.metadata(path)[SHARDING_INFO])
            for name in reader.names:
                extent = reader.shape(name)
                assert extent is not None
                self._parts[name].append((tuple(info[name]["saved_offsets"]), extent, partial(reader.read, name)))

    def shape(self, fqn: str) -> Shape | None:
        ends = [[low + n for low, n in zip(at, extent, strict=True)] for at, extent, _ in self._parts.get(fqn, ())]
        return tuple(map(max, zip(*ends, strict=True))) if ends else None

    def read(self, fqn: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        return put_together(fqn, offsets, sizes, self._parts[fqn])
