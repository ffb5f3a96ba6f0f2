"""Inert stand-ins for classes and functions that a pickle names: they record, and run nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

from ckptflow.torchfiles.budget import Budget

_FREE_ARGS: Final = 64
_TEXT: Final = frozenset({str})
_NOTHING: Final[dict[Any, Any]] = {}


class Stub:
    """Base of all stand-ins. Each foreign global is a subclass of its own; what is built from it is an instance.

    Attributes:
        stub_module: module of the global, as the pickle spells it.
        stub_name: name of the global in its module.
        args: positional arguments it was called with.
        kwargs: keyword arguments it was called with.
        state: what pickle's BUILD gave it; see ``stub_state``.
        items: what was appended or added, in order.
        mapping: what was set by key.
    """

    __slots__ = ("args", "items", "kwargs", "mapping", "state")

    stub_module: ClassVar[str] = ""
    stub_name: ClassVar[str] = ""
    stub_budget: ClassVar[Budget | None] = None

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    state: object
    items: Sequence[object]
    mapping: dict[object, object]

    def __new__(cls, *args: object, **kwargs: object) -> Stub:
        if cls.stub_budget is not None and (len(args) > _FREE_ARGS or len(kwargs) > _FREE_ARGS):
            cls.stub_budget.spend(len(args) + len(kwargs))
        stub = object.__new__(cls)
        # Millions of stubs hold nothing of the last three: these share what is empty.
        stub.args, stub.kwargs, stub.state, stub.items, stub.mapping = args, kwargs or _NOTHING, None, (), _NOTHING
        return stub

    def __setstate__(self, state: object) -> None:
        self.state = state

    def append(self, item: object) -> None:
        """Pickle's APPEND."""
        self.extend((item,))

    def extend(self, items: Iterable[object]) -> None:
        """Pickle's APPENDS."""
        if not isinstance(self.items, list):
            self.items = []
        self.items.extend(items)

    def add(self, item: object) -> None:
        """Pickle's ADDITEMS."""
        self.extend((item,))

    def __setitem__(self, key: object, value: object) -> None:
        if self.mapping is _NOTHING:
            self.mapping = {}
        self.mapping[key] = value


def stub_name(value: object) -> str:
    """``module.name`` of a stub, or of the class that stands in for it; the type's own name for anything else."""
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.stub_module}.{kind.stub_name}" if issubclass(kind, Stub) else kind.__qualname__


def stub_state(value: object) -> dict[str, object]:
    """Attributes of a stub: its state dict and slots merged; empty for anything that has none."""
    return merged_state(value.state) if isinstance(value, Stub) else {}


def merged_state(state: object) -> dict[str, object]:
    """The attributes in a pickle's state: a dict, or a pair of dict (or None) and slots. Not to be changed."""
    if isinstance(state, dict) and set(map(type, state)) <= _TEXT:
        return state
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    return {str(key): item for part in parts if isinstance(part, dict) for key, item in part.items()}


_TENSOR_KINDS: Final = {
    "_rebuild_sparse_tensor": "sparse",
    "_rebuild_sparse_csr_tensor": "sparse",
    "_rebuild_qtensor": "quantized",
    "_rebuild_nested_tensor": "nested",
    "_rebuild_device_tensor_from_cpu_tensor": "device",
    "_rebuild_device_tensor_from_numpy": "device",
    "_rebuild_xla_tensor": "XLA",
    "_rebuild_tensor_v3": "sub-byte",
}


def unsupported_tensor_kind(value: object) -> str | None:
    """``sparse``, ``quantized``, ``nested``… for a stub that stands for a tensor without plain values; else None."""
    if not isinstance(value, Stub) or value.stub_module != "torch._utils":
        return None
    return _TENSOR_KINDS.get(value.stub_name)
