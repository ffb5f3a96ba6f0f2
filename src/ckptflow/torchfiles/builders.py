"""Python's own classes and functions that pickles call: each makes a plain value or a stub, and nothing else.

Builders belong to one file and are objects without attributes, so that a pickle can change neither them nor what the
next file gets from them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any, NoReturn, SupportsIndex

from ckptflow.errors import UnsafeFileError
from ckptflow.torchfiles.budget import Budget
from ckptflow.torchfiles.lazy import Sealed
from ckptflow.torchfiles.stubs import Stub

Stand = Callable[[str, str], type[Stub]]
"""Gives the inert class for (module, name)."""


class StateDict(OrderedDict[object, object]):
    """An OrderedDict (or defaultdict, or Counter) of a pickle; of its attributes only ``_metadata`` is kept."""

    def __setstate__(self, state: object) -> None:
        self.__dict__["_metadata"] = state.get("_metadata") if isinstance(state, dict) else None


class Builder(Sealed):
    """A callable for the unpickler."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *args: object) -> object:
        return self._call(*args)

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError("a function can't be changed")


class PythonBuilders:
    """The classes and functions of Python itself that pickles call."""

    def __init__(self, budget: Budget, stand: Stand, path: str) -> None:
        self._budget = budget
        self._stand = stand
        self._path = path

    def table(self) -> dict[tuple[str, str], object]:
        """(module, name) → builder."""
        encode, reconstruct, new = Builder(self._encode), Builder(self._reconstruct), Builder(self._new)
        table: dict[tuple[str, str], object] = {
            ("collections", "OrderedDict"): Builder(self._ordered_dict),
            ("collections", "defaultdict"): Builder(self._defaultdict),
            ("collections", "Counter"): Builder(self._ordered_dict),
            ("collections", "deque"): Builder(self._list),
            ("_codecs", "encode"): encode,
            ("codecs", "encode"): encode,
            ("copyreg", "_reconstructor"): reconstruct,
            ("copy_reg", "_reconstructor"): reconstruct,
            ("copyreg", "__newobj__"): new,
            ("copy_reg", "__newobj__"): new,
        }
        for module in ("builtins", "__builtin__"):
            table[module, "set"] = Builder(self._set)
            table[module, "frozenset"] = Builder(self._frozenset)
            table[module, "bytes"] = table[module, "bytearray"] = Builder(self._bytes)
            table[module, "getattr"] = Builder(self._getattr)
        for module in ("pathlib", "pathlib._local"):
            table[module, "PosixPath"] = table[module, "PurePosixPath"] = Builder(self._posix_path)
        return table

    def _ordered_dict(self, items: object = ()) -> StateDict:
        return StateDict(self._check(items, dict, list)) if items else StateDict()

    def _defaultdict(self, factory: object = None, items: object = ()) -> StateDict:
        return self._ordered_dict(items)

    def _list(self, items: object = (), maxlen: object = None) -> list[object]:
        return list(self._check(items, list))

    def _set(self, items: object = ()) -> set[object]:
        return set(self._check(items, list))

    def _frozenset(self, items: object = ()) -> frozenset[object]:
        return frozenset(self._check(items, list))

    def _bytes(self, data: object = (), encoding: object = "latin1") -> bytes:
        # Protocol 2 spells bytes as bytes() or bytearray(text, 'latin-1'); bytes(n), n zeros, no writer needs.
        if isinstance(data, str):
            return self._encode(data, encoding)
        if isinstance(data, list | tuple):
            self._budget.spend(len(data))
            return bytes(_byte(item) for item in data)
        return data if isinstance(data, bytes) else bytes(self._check(data, bytearray))

    def _encode(self, text: object, encoding: object = "latin1") -> bytes:
        if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
            raise TypeError(f"text is encoded as {encoding!r}")
        self._budget.spend(len(text))
        return text.encode(str(encoding))

    def _check(self, items: object, *kinds: type[Collection[object]]) -> Collection[Any]:
        if items == ():
            return ()
        if not isinstance(items, kinds):
            raise TypeError(f"a container is made from a {type(items).__name__}")
        self._budget.spend(len(items))
        return items

    def _reconstruct(self, cls: object, base: object, state: object) -> object:
        stub = self._new(cls)
        if isinstance(state, dict | list):
            self._budget.spend(len(state))
        if isinstance(state, dict):
            stub.mapping = dict(state)
        elif isinstance(state, list):
            stub.items = list(state)
        return stub

    def _new(self, cls: object, *args: object) -> Stub:
        if not (isinstance(cls, type) and issubclass(cls, Stub)):
            raise TypeError("an object is made of something that isn't a class")
        return cls(*args)

    def _getattr(self, owner: object, name: object) -> type[Stub]:
        # Enum members (ShardedTensor), nested classes and bound methods are saved like this.
        kind = owner if isinstance(owner, type) else type(owner)
        if not issubclass(kind, Stub) or not isinstance(name, str):
            raise UnsafeFileError("a pickle looks up an attribute of something that isn't a stub", file=self._path)
        return self._stand(kind.stub_module, f"{kind.stub_name}.{name}")

    def _posix_path(self, *parts: object) -> str:
        texts = [str(part) for part in parts if isinstance(part, str)]
        self._budget.spend(sum(map(len, texts)))
        return "/" + "/".join(texts[1:]) if texts[:1] == ["/"] else "/".join(texts)


def _byte(item: object) -> SupportsIndex:
    if type(item) is not int:
        raise TypeError("bytes are made of something else than numbers")
    return item
