"""Hugging Face directories through the safetensors library and ``torch.load``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptflow.tensors import Shape
from ckptflow.validate.reread.base import by_plain_name, window_of
from ckptflow.validate.reread.torch_file import load_tensors

if TYPE_CHECKING:
    import torch


class HuggingFaceRereader:
    """All tensors of some ``.safetensors`` and ``.bin`` files."""

    how = "the safetensors library and torch.load"

    def __init__(self, files: Sequence[Path]) -> None:
        from safetensors import safe_open

        self._slices: dict[str, Any] = {}
        self._metadata: dict[Path, dict[str, str]] = {}
        for path in files:
            if path.suffix == ".safetensors":
                opened = safe_open(path, framework="pt")
                self._metadata[path] = opened.metadata() or {}  # type: ignore[no-untyped-call]
                names: list[str] = opened.keys()  # type: ignore[no-untyped-call]
                self._slices |= {name: (opened, name) for name in names}
            else:
                self._slices |= load_tensors(path)
        self._look_up = by_plain_name(list(self._slices))

    @property
    def names(self) -> list[str]:
        """All names, as they are in the files."""
        return list(self._slices)

    def metadata(self, path: Path) -> dict[str, str]:
        """``__metadata__`` of one of the safetensors files."""
        return self._metadata[path]

    def shape(self, fqn: str) -> Shape | None:
        name = self._look_up(fqn)
        if name is None:
            return None
        found = self._slices[name]
        return tuple(found[0].get_slice(name).get_shape() if isinstance(found, tuple) else found.shape)

    def read(self, fqn: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        name = self._look_up(fqn)
        found = self._slices[name or fqn]
        window = window_of(offsets, sizes)
        if not isinstance(found, tuple):
            box: torch.Tensor = found[window].detach()
            return box
        opened, key = found
        # safetensors can't slice a tensor without dims
        box = opened.get_slice(key)[window] if window else opened.get_tensor(key)
        return box  # noqa: RET504 - its type is declared above
