"""Finds where a pickle of torch says which part of a storage a tensor uses, without changing anything.

The restricted unpickler gives values but not the bytes that they came from, so that this walks over the opcodes with a
stack of its own. It follows only what matters here: storages (persistent ids), the calls that make tensors of them, and
the integers in both. Whatever it doesn't know keeps its storage whole: a storage may be cut only if each mention of it
is an argument of a known rebuild function.

Opcodes: https://github.com/python/cpython/blob/3.11/Lib/pickletools.py; functions: torch/_utils.py, torch/_tensor.py.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeGuard

from ckptflow.errors import CorruptFileError
from ckptflow.shrink.uses import Literal, StorageUse, Survey, TensorUse
from ckptflow.torchfiles.dtypes import ITEMSIZE, StorageType, TorchDtype
from ckptflow.torchfiles.pickles import torch_token

_REBUILDS: Final = {
    ("torch._utils", "_rebuild_tensor"): 4,
    ("torch._utils", "_rebuild_tensor_v2"): 4,
    ("torch._utils", "_rebuild_tensor_v3"): 7,
}
"""Functions of (storage, storage offset, size, stride, …) → how many arguments they need; v3's 7th is the dtype."""
_V3: Final = ("torch._utils", "_rebuild_tensor_v3")
_FROM_TYPE: Final = {
    ("torch._tensor", "_rebuild_from_type"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch.tensor", "_rebuild_from_type"),
}
"""Functions of (rebuild function, class, its arguments, state)."""
_SEE_VALUES_ONLY: Final = {
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_parameter_with_state"),
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"),
}
"""Functions that take a tensor and can't look at its storage beyond the tensor."""
_MAX_TEXT: Final = 1_000
_PUTS: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GETS: Final = frozenset({"GET", "BINGET", "LONG_BINGET"})
_INTS: Final = frozenset({"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"})
_TEXTS: Final = frozenset({"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING", "BINSTRING"})
_SHORT_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def survey_pickle(data: bytes, path: str) -> Survey:
    """Walks over a pickle that ``open_torch_file`` has accepted.

    Raises:
        CorruptFileError: it is not a sound pickle after all.
    """
    machine = _Machine()
    try:
        for name, argument, start, end in _opcodes(data):
            machine.step(name, argument, start, end)
    except (IndexError, KeyError, ValueError) as error:
        raise CorruptFileError("the pickle in the file is damaged", file=path, found=f"{error!r}"[:300]) from error
    return Survey(tuple(machine.uses), tuple(machine.frames), machine.unknown)


def _opcodes(data: bytes) -> Iterator[tuple[str, object, int, int]]:
    """Name, argument, first byte and the byte behind each opcode."""
    waiting: tuple[str, object, int] | None = None
    for opcode, argument, position in pickletools.genops(data):
        start = position or 0
        if waiting is not None:
            yield (*waiting, start)
        waiting = (opcode.name, argument, start)
    if waiting is not None:
        yield (*waiting, len(data))


@dataclass(frozen=True, slots=True)
class _Global:
    name: tuple[str, str]


@dataclass(slots=True, eq=False)
class _Tuple:
    """A tuple of anything but integers alone; once it is a persistent id or arguments, ``made`` says of what."""

    items: tuple[_Value, ...]
    made: StorageUse | None = None
    shared: bool = False


@dataclass(frozen=True, slots=True)
class _Mark:
    pass


# None is anything that doesn't matter; a tuple of int a shape or strides.
_Value = Literal | StorageUse | tuple[int, ...] | _Global | _Tuple | _Mark | None
_MARK: Final = _Mark()
_STACK_EFFECTS: Final = {opcode.name: (opcode.stack_before, opcode.stack_after) for opcode in pickletools.opcodes}


@dataclass(slots=True)
class _Machine:
    uses: list[StorageUse] = field(default_factory=list)
    frames: list[tuple[int, int]] = field(default_factory=list)
    unknown: int = 0
    stack: list[_Value] = field(default_factory=list)
    memo: dict[int, _Value] = field(default_factory=dict)

    def step(self, name: str, argument: object, start: int, end: int) -> None:
        stack = self.stack
        if name in _PUTS:
            self._put(len(self.memo) if name == "MEMOIZE" else _index(argument))
        elif name in _GETS:
            stack.append(self._get(_index(argument), start, end))
        elif name in _INTS:
            stack.append(Literal(argument, start, end) if type(argument) is int else None)
        elif name in _TEXTS:
            stack.append(Literal(argument, start, end) if _is_short_text(argument) else None)
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "TUPLE":
            stack.append(_tuple(self._pop_to_mark()))
        elif name in _SHORT_TUPLES:
            items = [stack.pop() for _ in range(_SHORT_TUPLES[name])]
            stack.append(_tuple(items[::-1]))
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name == "BINPERSID":
            stack.append(self._storage(stack.pop()))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(self._call(stack.pop(), arguments))
        else:
            self._rarer(name, argument, end)

    def _rarer(self, name: str, argument: object, end: int) -> None:
        stack = self.stack
        if name == "GLOBAL":
            module, _, attribute = str(argument).partition(" ")
            stack.append(_Global((module, attribute)))
        elif name == "STACK_GLOBAL":
            stack.append(_stack_global(stack.pop(), stack.pop()))
        elif name == "BUILD":
            stack.pop()
            # A state changes a tensor in ways that aren't known.
            _keep_whole(stack[-1])
        elif name == "POP":
            stack.pop()
        elif name == "DUP":
            stack.append(_second(stack[-1]))
        elif name == "FRAME":
            self.frames.append((end, _index(argument)))
        else:
            self._anything(name)

    def _anything(self, name: str) -> None:
        before, after = _STACK_EFFECTS[name]
        if pickletools.markobject in before:
            self._pop_to_mark()
            before = before[: before.index(pickletools.markobject)]
        for _ in before:
            self.stack.pop()
        self.stack.extend([None] * len(after))

    def _pop_to_mark(self) -> list[_Value]:
        items: list[_Value] = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def _put(self, index: int) -> None:
        top = self.stack[-1]
        if isinstance(top, StorageUse) and top.tensor is None:
            top.whole = True
        self.memo[index] = top

    def _get(self, index: int, start: int, end: int) -> _Value:
        value = _second(self.memo[index])
        # Here the opcode that fetches it may be replaced.
        return Literal(value.value, start, end) if isinstance(value, Literal) else value

    def _storage(self, pid: _Value) -> _Value:
        """``('storage', type, key, location, numel[, None])``."""
        if not isinstance(pid, _Tuple) or len(pid.items) not in (5, 6):
            self.unknown += 1
            return None
        _, kind, key, _, numel, *view = pid.items
        token = torch_token(*kind.name) if isinstance(kind, _Global) else None
        if not isinstance(token, StorageType) or not _is_text(key) or not isinstance(numel, Literal):
            self.unknown += 1
            return None
        # Views on storages (torch before 0.4).
        self.unknown += view not in ([], [None])
        use = StorageUse(key, numel, token.itemsize, whole=pid.shared or type(numel.value) is not int)
        self.uses.append(use)
        pid.made, pid.items = use, ()
        return use

    def _call(self, function: _Value, arguments: _Value) -> _Value:
        name = function.name if isinstance(function, _Global) else None
        items = arguments.items if isinstance(arguments, _Tuple) else ()
        if name in _FROM_TYPE and len(items) >= 3 and isinstance(items[0], _Global):
            name, arguments = items[0].name, items[2]
            items = arguments.items if isinstance(arguments, _Tuple) else ()
        if name in _REBUILDS and isinstance(arguments, _Tuple) and len(items) >= _REBUILDS[name]:
            return _rebuild(arguments, items, is_v3=name == _V3)
        if name not in _SEE_VALUES_ONLY:
            for item in items:
                _keep_whole(item)
            return None
        return items[0] if items else None


def _rebuild(arguments: _Tuple, items: tuple[_Value, ...], *, is_v3: bool) -> _Value:
    use, offset, shape, strides = items[:4]
    if not isinstance(use, StorageUse):
        return None
    itemsize: int | None = use.itemsize
    if is_v3:
        token = torch_token(*items[6].name) if isinstance(items[6], _Global) else None
        itemsize = ITEMSIZE.get(token.name) if isinstance(token, TorchDtype) else None
    if (
        use.tensor is not None
        or not isinstance(offset, Literal)
        or type(offset.value) is not int
        or not isinstance(shape, tuple)
        or not isinstance(strides, tuple)
        or itemsize is None
    ):
        use.whole = True
        return use
    use.whole = use.whole or arguments.shared
    use.tensor = TensorUse(offset, shape, strides, itemsize)
    arguments.made, arguments.items = use, ()
    # What stands for the tensor on the stack is its storage's use: one stands for the other from here on.
    return use


def _stack_global(attribute: _Value, module: _Value) -> _Value:
    if not isinstance(attribute, Literal) or not isinstance(module, Literal):
        return None
    return _Global((str(module.value), str(attribute.value)))


def _tuple(items: list[_Value]) -> _Value:
    if all(isinstance(item, Literal) and type(item.value) is int for item in items):
        return tuple(int(item.value) for item in items if isinstance(item, Literal))
    return _Tuple(tuple(items))


def _second(value: _Value) -> _Value:
    """A value that is used at a second place: what it is made of must not be changed for the first."""
    if isinstance(value, Literal):
        value.editable = False
        return value
    waiting: list[_Value] = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, StorageUse) and item.tensor is None:
            item.whole = True
        elif isinstance(item, _Tuple) and not item.shared:
            item.shared = True
            _keep_whole(item.made)
            waiting.extend(item.items)
    return value


def _is_text(value: _Value) -> TypeGuard[Literal]:
    return isinstance(value, Literal) and isinstance(value.value, str)


def _keep_whole(value: _Value) -> None:
    if isinstance(value, StorageUse):
        value.whole = True


def _index(argument: object) -> int:
    if type(argument) is not int:
        raise ValueError(f"{argument!r} isn't an index")
    return argument


def _is_short_text(argument: object) -> TypeGuard[str]:
    return isinstance(argument, str) and len(argument) <= _MAX_TEXT
