"""Sees what a model's own code does to its parameters. Runs only in the helper process of ``fresh_model``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckptflow.seeding.notes import InitNotes

if TYPE_CHECKING:
    import torch


@contextmanager
def recording() -> Iterator[InitNotes]:
    """Note all that is done to tensors on the meta device inside the block."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import initialization

    notes = InitNotes()

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            notes.saw(func, result, args, kwargs or {})
            return result

    def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = make_tensor(*args, **kwargs)
        if made.is_meta:  # its values pass by the dispatcher
            notes.know(made, make_tensor(*args, **{**kwargs, "device": "cpu"}))
        return made

    replaced: dict[str, Any] = {"trunc_normal_": notes.truncated_normal, "orthogonal_": notes.orthogonal}
    table: Any = initialization.TORCH_INIT_FUNCTIONS
    originals = {name: (table[name], getattr(torch.nn.init, name)) for name in replaced}
    make_tensor = torch.tensor
    for name, function in replaced.items():
        table[name] = function
        setattr(torch.nn.init, name, function)
    torch.tensor = tensor
    try:
        with Mode():  # type: ignore[no-untyped-call]
            yield notes
    finally:
        torch.tensor = make_tensor
        for name, (of_transformers, of_torch) in originals.items():
            table[name] = of_transformers
            setattr(torch.nn.init, name, of_torch)
