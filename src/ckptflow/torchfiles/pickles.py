"""The restricted unpickler: it imports nothing and runs nothing that a file names."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, cast

from ckptflow.errors import CheckpointError, CorruptFileError, UnsafeFileError
from ckptflow.processes.collector import without_gc
from ckptflow.torchfiles.budget import Budget
from ckptflow.torchfiles.builders import PythonBuilders
from ckptflow.torchfiles.distributed import IntReader, RecordBuilder
from ckptflow.torchfiles.dtypes import DTYPE_ALIASES, ITEMSIZE, STORAGE_DTYPES, StorageType, TorchDtype
from ckptflow.torchfiles.globals import is_foreign, may_be_stub
from ckptflow.torchfiles.lazy import LazyTensor
from ckptflow.torchfiles.opcodes import MAX_PICKLE_BYTES, PickleEndsEarlyError, max_tuples, scan_pickle
from ckptflow.torchfiles.stubs import Stub
from ckptflow.torchfiles.torch_builders import TorchBuilders

MAX_DEPTH: Final = 200
# Distinct classes: each costs about 1.5 KB, and no program has that many in a checkpoint.
MAX_GLOBALS: Final = 10_000
MAX_NAME_LENGTH: Final = 1_000
# CPython hashes nested tuples by recursion in C without a bound: 96 bytes of stack each in 3.11, taken threefold.
_STACK_BYTES_PER_TUPLE: Final = 256
_TUPLES_ON_ANY_STACK: Final = 1_000
_COPIES_PER_BYTE: Final = 8
_FREE_COPIES: Final = 2**22

PersistentLoad = Callable[[object], object]

# All that C code and the builders raise on garbage; anything else is a fault of ours and shall show.
_GARBAGE: Final = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class RestrictedUnpickler(pickle.Unpickler):
    """Reads one pickle of one file.

    Args:
        data: the pickle.
        path: the file, for messages.
        persistent_load: gives the storages that the pickle refers to.
        read_ints: reads the ranks of device meshes.
    """

    def __init__(self, data: bytes, path: str, persistent_load: PersistentLoad, read_ints: IntReader) -> None:
        # A reader that can peek is asked for 128 KB at a time; BytesIO, which can't, for each opcode.
        super().__init__(io.BufferedReader(io.BytesIO(data), 2**17), encoding="latin1")
        self._path = path
        self._persistent_load = persistent_load
        self._stubs: dict[tuple[str, str], type[Stub]] = {}
        self._budget = budget = Budget(path, _COPIES_PER_BYTE * len(data) + _FREE_COPIES)
        self._known = PythonBuilders(budget, self.stand, path).table()
        self._known.update(TorchBuilders(RecordBuilder(path, read_ints, budget), self.stand).table())

    def find_class(self, module: str, name: str) -> object:
        """A builder, a token or an inert stub for a global; never the thing itself."""
        known = self._known.get((module, name))
        if known is None:
            known = self._known[module, name] = torch_token(module, name) or self.stand(module, name)
        return known

    def persistent_load(self, pid: object) -> object:
        """A storage."""
        return self._persistent_load(pid)

    def stand(self, module: str, name: str) -> type[Stub]:
        """The inert class for a global.

        Raises:
            UnsafeFileError: the global belongs to Python itself and isn't known to be harmless.
        """
        stub = self._stubs.get((module, name))
        if stub is not None:
            return stub
        if not may_be_stub(module, name):
            raise UnsafeFileError(
                "the file asks for code to be run",
                file=self._path,
                expected="data",
                found=f"a reference to {module}.{name}",
                fix="don't load this file with torch.load; if it is your own, save the tensors alone and convert these",
            )
        if len(self._stubs) >= MAX_GLOBALS or len(module) + len(name) > MAX_NAME_LENGTH:
            raise UnsafeFileError("a pickle names an absurd number of classes, or absurdly long ones", file=self._path)
        facts = {"__slots__": (), "stub_module": module, "stub_name": name, "stub_budget": self._budget}
        stub = type(name, (Stub,), facts)
        self._stubs[module, name] = stub
        return stub

    def close(self) -> None:
        """Lets go of all that was read, so that it needn't wait for the garbage collector."""
        self.memo.clear()
        self._known.clear()

    def foreign_globals(self) -> tuple[str, ...]:
        """Sorted ``module.name`` of the stubs met that are neither Python's nor torch's nor NumPy's."""
        return tuple(sorted(f"{module}.{name}" for module, name in self._stubs if is_foreign(module)))


def torch_token(module: str, name: str) -> TorchDtype | StorageType | None:
    """A dtype or storage type of torch."""
    if module == "torch" and name in ITEMSIZE:
        return TorchDtype(name)
    if module == "torch" and name in DTYPE_ALIASES:
        return TorchDtype(DTYPE_ALIASES[name])
    if module in ("torch", "torch.cuda", "torch.storage") and name in STORAGE_DTYPES:
        return StorageType(STORAGE_DTYPES[name])
    return None


def load_pickle(
    data: bytes, path: str, persistent_load: PersistentLoad, read_ints: IntReader
) -> tuple[object, tuple[str, ...]]:
    """Reads a whole pickle, as ``(value, foreign globals)``.

    Raises:
        CorruptFileError: garbage, or nested too deep.
        UnsafeFileError: code, or absurd sizes.
    """
    check_pickle(data, path)
    with translated(path):
        unpickler = RestrictedUnpickler(data, path, persistent_load, read_ints)
        value = load_with_stack(unpickler, data, path)
        foreign = unpickler.foreign_globals()
        unpickler.close()
    check_depth(value, path)
    return value, foreign


def check_pickle(data: bytes, path: str) -> None:
    """Scans a pickle that must end within ``data``."""
    if len(data) > MAX_PICKLE_BYTES:
        raise UnsafeFileError("a pickle is absurdly large", file=path, found=f"{len(data)} bytes")
    try:
        scan_pickle(data, path)
    except PickleEndsEarlyError:
        raise CorruptFileError("the pickle ends early", file=path, found=f"{len(data)} bytes") from None


@contextmanager
def translated(path: str) -> Iterator[None]:
    """Turns what unpickling garbage raises into CorruptFileError."""
    try:
        yield
    except _GARBAGE as error:
        found = f"{type(error).__name__}: {error}"[:300]
        raise CorruptFileError("the pickle in the file is damaged", file=path, found=found) from error


def load_with_stack(unpickler: pickle.Unpickler, data: bytes, path: str) -> object:
    """Loads with enough stack for the deepest tuple that the pickle could make; hashing it recurses in C."""
    tuples = min(max_tuples(data), len(data))
    if tuples <= _TUPLES_ON_ANY_STACK:
        return unpickler.load()
    outcome: list[object] = []
    failure: list[Exception] = []

    def load() -> None:
        try:
            with without_gc():
                outcome.append(unpickler.load())
        except (*_GARBAGE, CheckpointError) as error:
            failure.append(error)

    stack_bytes = 2**20 + _STACK_BYTES_PER_TUPLE * tuples
    try:
        _run_with_stack(load, -(-stack_bytes // 2**16) * 2**16)
    except RuntimeError as error:
        raise UnsafeFileError(
            "a pickle may nest tuples deeper than the stack allows", file=path, found=f"{tuples} tuples"
        ) from error
    if failure:
        raise failure[0]
    return outcome[0]


_stack_size_lock = threading.Lock()


def _run_with_stack(function: Callable[[], None], stack_bytes: int) -> None:
    # The address space is reserved, not used: pages of the stack come into being when touched.
    with _stack_size_lock:
        before = threading.stack_size(stack_bytes)
        try:
            thread = threading.Thread(target=function, name="ckptflow-unpickle")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()


def check_depth(value: object, path: str) -> None:
    """Raises CorruptFileError where containers nest deeper than ``MAX_DEPTH``, so that walks may recurse."""
    level: list[object] = [value] if isinstance(value, _CONTAINERS) else []
    seen: set[int] = set()
    leaves: set[type] = {str, int, float, bool, bytes, type(None), LazyTensor}
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for container in level:
            if id(container) not in seen:
                seen.add(id(container))
                _add_containers(container, below, leaves)
        if not below:
            return
        level = below
    raise CorruptFileError("the saved object is nested too deep", file=path, expected=f"at most {MAX_DEPTH} levels")


_CONTAINERS: Final = (dict, list, tuple, set, frozenset, Stub)


def _add_containers(container: object, below: list[object], leaves: set[type]) -> None:
    """Adds the containers directly inside; ``leaves`` are types that were found to be none."""
    items: Iterable[object]
    if isinstance(container, Stub):
        items = (container.args, container.kwargs, container.state, container.items, container.mapping)
    elif isinstance(container, dict):
        items = container.values()
        below += [key for key in container if type(key) not in leaves and isinstance(key, _CONTAINERS)]
    else:
        items = cast("Iterable[object]", container)
    for item in items:
        if type(item) in leaves:
            continue
        if not isinstance(item, _CONTAINERS):
            leaves.add(type(item))
        elif item or isinstance(item, Stub):
            below.append(item)


def no_persistent_load(pid: object) -> object:
    """For pickles that have no storages."""
    raise pickle.UnpicklingError("a persistent id where there can be none")


def no_ints(tensor: LazyTensor) -> tuple[int, ...]:
    """For pickles that have no tensors."""
    raise pickle.UnpicklingError("a tensor where there can be none")
