"""Single torch files, of a model alone or of a whole training state, through ``torch.load``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ckptflow.tensors import Shape
from ckptflow.validate.reread.base import by_ending, window_of
from ckptflow.validate.reread.torch_stubs import load_plain, trained_values

if TYPE_CHECKING:
    import torch

HOMES = ("", "state_dict.", "model.", "module.", "model_state_dict.")


class TorchFileRereader:
    """The tensors of one file, whatever dicts and lists they lie in.

    Raises:
        pickle.UnpicklingError, RuntimeError: torch refuses the file.
    """

    how = "torch.load of the file"

    def __init__(self, file: Path) -> None:
        self._tensors = load_tensors(file)
        self._look_up = by_ending(self._tensors, HOMES)

    def shape(self, fqn: str) -> Shape | None:
        name = self._look_up(fqn)
        return None if name is None else tuple(self._tensors[name].shape)

    def read(self, fqn: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        return self._tensors[self._look_up(fqn) or fqn][window_of(offsets, sizes)]


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a torch file, by the keys that lead to them, with dots between.

    Raises:
        pickle.UnpicklingError, RuntimeError: torch refuses the file, or it holds no dict.
    """
    try:
        loaded = load_plain(path, mmap=True)
    except RuntimeError:  # legacy files, not zip, can't be mapped
        loaded = load_plain(path)
    if not isinstance(loaded, dict):
        raise RuntimeError(f"{path.name} holds a {type(loaded).__name__}, not a state dict")
    return dict(named_tensors("", loaded))


def named_tensors(path: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors inside ``value``, by ``path`` and the keys that lead to them, with dots between."""
    import torch

    if isinstance(value, torch.Tensor):
        yield path, trained_values(value).detach()
    elif isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from named_tensors(f"{path}.{key}" if path else str(key), item)
