"""Stand-ins for the tensor classes in which torchao trains and quantizes weights, pickled under torchao's names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

MODULE = "torchao.float8.fsdp_utils"


class Settings(NamedTuple):
    """What a wrapper keeps beside the weight."""

    emulate: bool = False


class Wrapped(torch.Tensor):
    """A weight that is kept as it is, or as something else, and computed with in another way."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, dtype: torch.dtype | None = None, attribute: str = "_tensor") -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=dtype or inner.dtype)
        return made

    def __init__(self, inner: torch.Tensor, dtype: torch.dtype | None = None, attribute: str = "_tensor") -> None:
        self.attribute = attribute
        setattr(self, attribute, inner)
        self.settings = Settings()

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return [self.attribute], {}

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next(x for x in args if isinstance(x, Wrapped))
        plain = tree_map(lambda x: getattr(x, x.attribute) if isinstance(x, Wrapped) else x, (args, kwargs or {}))
        found = func(*plain[0], **plain[1])
        return cls(found, first.dtype, first.attribute) if isinstance(found, torch.Tensor) else found


@contextmanager
def torchaos(name: str, module: str = MODULE) -> Iterator[type[Wrapped]]:
    """A class of that name, importable while files are written."""
    made = ModuleType(module)
    kept = type(name, (Wrapped,), {"__module__": module})
    Settings.__module__ = module
    made.__dict__.update({name: kept, "Settings": Settings})
    parts = module.split(".")
    names = [".".join(parts[: n + 1]) for n in range(len(parts))]
    sys.modules.update({each: ModuleType(each) for each in names[:-1]} | {module: made})
    try:
        yield kept
    finally:
        for each in names:
            del sys.modules[each]


def in_dtensor(sharded: DTensor, kept: type[Wrapped]) -> DTensor:
    """The same DTensor with its local tensor inside ``kept``."""
    return DTensor(kept(sharded.to_local()), sharded._spec, requires_grad=False)  # type: ignore[call-arg]
