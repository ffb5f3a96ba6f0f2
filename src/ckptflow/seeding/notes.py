"""What is known of tensors without memory, by the operators that made and filled them.

Modules and transformers' ``_init_weights`` fill parameters by a handful of operators. Each of them leaves a
note on the storage that it writes to. Whatever is not understood makes the storage unknown, and an unknown parameter
is refused by name: a guess would be a wrong model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptflow.seeding.arithmetic import changed_by, covers
from ckptflow.seeding.fills import Constant, Fill, Kind, Normal, Sequence, TruncatedNormal, Uniform, Values
from ckptflow.seeding.shadows import Shadows, is_tensor

if TYPE_CHECKING:
    import torch

# Computed values travel whole; only small tensors are ever computed.
MOST_VALUE_BYTES = 256 * 10**6

# Operators that put elements in other places and leave their values alone.
_MOVING = frozenset(("clone", "_to_copy", "cat", "stack", "repeat", "index_select", "_unsafe_view"))


@dataclass(slots=True)
class _Storage:
    """``first`` keeps its address, ``unknown`` says what was not understood, ``copied_from`` is an address."""

    first: torch.Tensor
    numel: int
    fills: list[Fill] = field(default_factory=list)
    unknown: str | None = None
    copied_from: int | None = None

    def put(self, fill: Fill) -> None:
        if fill.start == 0 and fill.stop == self.numel:
            self.fills, self.unknown, self.copied_from = [], None, None
        self.fills = [f for f in self.fills if f.start < fill.start or f.stop > fill.stop]
        self.fills.append(fill)


class InitNotes:
    """What was seen; ``fills_of`` tells how a tensor was filled."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}
        self._shadows = Shadows()

    def saw(self, func: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of one operator."""
        name = func._schema.name
        if func._schema.is_mutable:
            self._mutated(name, args, kwargs)
            if args and is_tensor(args[0]) and args[0].is_meta:
                self._shadows.mutated(func, args[0], args, kwargs)
            return
        self._shadows.made(func, name.removeprefix("aten::"), result, args, kwargs)
        for made in result if isinstance(result, list | tuple) else (result,):
            if is_tensor(made) and made.is_meta and _key(made) not in self._storages:
                self._made(name, made, args)

    def know(self, tensor: torch.Tensor, twin: torch.Tensor) -> None:
        """A tensor was made of plain numbers."""
        self._shadows.know(tensor, twin)
        storage = self._storage(tensor)
        storage.put(Fill(start=0, stop=storage.numel, kind=_values(twin)))

    def truncated_normal(
        self, tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, **_: object
    ) -> torch.Tensor:
        """Takes the place of ``torch.nn.init.trunc_normal_``, which is made of many operators."""
        self._put(tensor, TruncatedNormal(mean=float(mean), std=float(std), low=float(a), high=float(b)))
        return tensor

    def orthogonal(self, tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Takes the place of ``torch.nn.init.orthogonal_``, which leaves a tensor on the meta device as it was."""
        self._forget(tensor, "its value comes from orthogonal_")
        self._shadows.forget(tensor)
        return tensor

    def refuse_copies(self, tensors: Iterable[torch.Tensor]) -> None:
        """Forget what was copied from one random parameter to another: both must be the same, and are drawn apart."""
        alive = {_key(tensor) for tensor in tensors}
        for storage in self._storages.values():
            if storage.copied_from in alive:
                storage.unknown = "it is a copy of another parameter"
                self._shadows.forget(storage.first)

    def fills_of(self, tensor: torch.Tensor) -> tuple[Fill, ...] | str:
        """The fills that make the tensor, or why they aren't known."""
        numel = tensor.numel()
        if not tensor.is_meta:
            return (Fill(start=0, stop=numel, kind=_values(tensor)),)
        storage = self._storages.get(_key(tensor))
        if storage is None:
            return "it was made outside of the model's own code"
        twin = None if storage.unknown is None else self._shadows.of(storage.first)
        if twin is not None and tensor.is_contiguous() and numel == storage.numel == twin.numel():
            values = _known_values(twin)
            return storage.unknown or "" if values is None else (Fill(start=0, stop=numel, kind=values),)
        if storage.unknown is not None:
            return storage.unknown
        if tensor.is_contiguous() and tensor.storage_offset() == 0 and numel == storage.numel:
            return tuple(storage.fills) if covers(storage.fills, numel) else "nothing gives it a value"
        kind = self._kind(tensor)
        if kind is None:
            return "it is a part of a tensor with several kinds of values"
        return (Fill(start=0, stop=numel, kind=kind),)

    def _mutated(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target = args[0] if args else kwargs.get("self")
        if not is_tensor(target) or not target.is_meta:
            return
        short = name.removeprefix("aten::")
        facts = dict(zip(_NAMES.get(short, ()), args[1:], strict=False)) | kwargs
        if short == "normal_":
            self._put(target, Normal(mean=float(facts.get("mean", 0.0)), std=float(facts.get("std", 1.0))))
        elif short == "uniform_":
            self._put(target, Uniform(low=float(facts.get("from", 0.0)), high=float(facts.get("to", 1.0))))
        elif short == "zero_":
            self._put(target, Constant(value=0.0))
        elif short == "fill_" and (value := _scalar(facts["value"])) is not None:
            self._put(target, Constant(value=value))
        elif short == "copy_" and (kind := self._copied(target, facts["src"])) is not None:
            self._put(target, kind)
            if facts["src"].is_meta and not isinstance(kind, Constant | Values):
                self._storage(target).copied_from = _key(facts["src"])
        elif short in ("mul_", "div_", "add_", "sub_") and len(args) == 2 and (value := _scalar(args[1])) is not None:
            self._change(target, short, value)
        else:
            self._forget(target, f"its value comes from {name}")

    def _made(self, name: str, made: torch.Tensor, args: tuple[Any, ...]) -> None:
        short = name.removeprefix("aten::")
        storage = self._storage(made)
        if short.startswith(("empty", "new_empty")):
            return
        kind = _MADE[short](args) if short in _MADE else self._derived(short, args)
        if kind is None and (twin := self._shadows.of(made)) is not None:
            kind = _known_values(twin)
        if kind is None:
            storage.unknown = f"its value comes from {name}"
        else:
            storage.put(Fill(start=0, stop=storage.numel, kind=kind))

    def _derived(self, name: str, args: tuple[Any, ...]) -> Kind | None:
        """What a new tensor is like that was made of others."""
        if name in _MOVING:
            return self._shared_kind(args)
        if name == "constant_pad_nd":
            kind = self._shared_kind(args)
            value = _scalar(args[2]) if len(args) > 2 else 0.0
            return kind if not any(args[1]) or (isinstance(kind, Constant) and kind.value == value) else None
        if name in ("mul", "div", "add", "sub") and len(args) == 2 and (value := _scalar(args[1])) is not None:
            source = self._kind(args[0]) if is_tensor(args[0]) and args[0].is_meta else None
            return None if source is None else changed_by(source, name, value)
        return None

    def _shared_kind(self, args: tuple[Any, ...]) -> Kind | None:
        """What all tensors that were put together have in common."""
        given = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        kinds = {self._kind(tensor) if tensor.is_meta else None for tensor in given}
        return kinds.pop() if len(kinds) == 1 else None

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> Kind | None:
        kind = self._kind(source) if source.is_meta else None
        twin = self._shadows.of(source)
        if kind is not None or twin is None:
            return kind
        return _known_values(twin.to(target.dtype).expand(target.shape))

    def _kind(self, tensor: torch.Tensor) -> Kind | None:
        """What every element of the tensor is alike, whatever its place."""
        storage = self._storages.get(_key(tensor))
        if storage is None or storage.unknown is not None or len(storage.fills) != 1:
            return None
        fill = storage.fills[0]
        is_whole = fill.start == 0 and fill.stop == storage.numel
        return fill.kind if is_whole and not isinstance(fill.kind, Sequence | Values) else None

    def _change(self, target: torch.Tensor, name: str, value: float) -> None:
        storage = self._storage(target)
        begin = int(target.storage_offset())
        end = begin + target.numel()
        last = storage.fills[-1] if storage.fills else None
        changed = None
        is_known = storage.unknown is None and target.is_contiguous()
        if is_known and last is not None and (last.start, last.stop) == (begin, end):
            changed = changed_by(last.kind, name.removesuffix("_"), value)
        if changed is None:
            self._forget(target, f"its value comes from aten::{name}")
        else:
            storage.put(Fill(start=begin, stop=end, kind=changed))

    def _put(self, target: torch.Tensor, kind: Kind) -> None:
        storage = self._storage(target)
        if not target.is_contiguous():
            self._forget(target, "a part of it is filled that does not lie in one piece")
            return
        begin = int(target.storage_offset())
        storage.put(Fill(start=begin, stop=begin + target.numel(), kind=kind))

    def _forget(self, target: torch.Tensor, why: str) -> None:
        self._storage(target).unknown = why

    def _storage(self, tensor: torch.Tensor) -> _Storage:
        known = self._storages.get(_key(tensor))
        if known is None:
            known = _Storage(tensor, tensor.untyped_storage().nbytes() // tensor.element_size())
            self._storages[_key(tensor)] = known
        return known


_NAMES = {
    "normal_": ("mean", "std"),
    "uniform_": ("from", "to"),
    "fill_": ("value",),
    "copy_": ("src",),
}


def _full(args: tuple[Any, ...]) -> Kind | None:
    value = _scalar(args[-1])
    return None if value is None else Constant(value=value)


def _arange(args: tuple[Any, ...]) -> Kind:
    start = args[0] if len(args) > 1 else 0
    return Sequence(start=float(start), step=float(args[2] if len(args) > 2 else 1))


_MADE: dict[str, Callable[[tuple[Any, ...]], Kind | None]] = {
    "zeros": lambda _: Constant(value=0.0),
    "zeros_like": lambda _: Constant(value=0.0),
    "new_zeros": lambda _: Constant(value=0.0),
    "ones": lambda _: Constant(value=1.0),
    "ones_like": lambda _: Constant(value=1.0),
    "new_ones": lambda _: Constant(value=1.0),
    "full": _full,
    "full_like": _full,
    "new_full": _full,
    "randn": lambda _: Normal(mean=0.0, std=1.0),
    "rand": lambda _: Uniform(low=0.0, high=1.0),
    "arange": _arange,
}


def _key(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _scalar(value: object) -> float | None:
    if is_tensor(value):
        return None if value.is_meta or value.numel() != 1 else float(value.item())
    return float(value) if isinstance(value, int | float) else None


def _known_values(twin: torch.Tensor) -> Values | None:
    """The values, unless there is memory among them that nothing was written to."""
    return None if bool(twin.isnan().any()) else _values(twin)


def _values(tensor: torch.Tensor) -> Values:
    if tensor.nbytes > MOST_VALUE_BYTES:
        raise ValueError(f"{tensor.nbytes} bytes of computed values in one tensor")
    array = tensor.detach().contiguous()
    array = array.float() if array.is_floating_point() else array
    numpy_array = array.numpy()
    return Values.of(numpy_array.dtype.name, numpy_array.tobytes())
