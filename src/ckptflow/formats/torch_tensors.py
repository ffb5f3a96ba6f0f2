"""From what a torch file holds to tensor sources: state dicts, plain tensors, storages and what they waste."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import cast

from ckptflow.dtypes import DTYPES, DType
from ckptflow.errors import CorruptFileError, InconsistentCheckpointError, UnsupportedCheckpointError
from ckptflow.manifest import LeftOut
from ckptflow.tensors import Shape, SourceFile, TensorSource, whole
from ckptflow.torchfiles import (
    DTensor,
    LazyStorage,
    LazyTensor,
    MetaTensor,
    ShardedTensor,
    Stub,
    stub_name,
    unsupported_tensor_kind,
)

AnyTensor = LazyTensor | MetaTensor | DTensor | ShardedTensor
TENSOR_TYPES = (LazyTensor, MetaTensor, DTensor, ShardedTensor)
# Containers deeper than this hold no state dict.
MAX_DEPTH = 32


def state_dict_entries(value: object, path: str) -> tuple[dict[str, AnyTensor], list[LeftOut]]:
    """The tensors of a flat state dict in file order, and its entries that are no tensors.

    Raises:
        CorruptFileError: the file holds something else than a dict of names.
        UnsupportedCheckpointError: tensors lie deeper than the first level: not a state dict but a whole checkpoint; or
            one is sparse, quantized or of a class that computes its values.
    """
    if not isinstance(value, Mapping):
        raise CorruptFileError("the file holds no state dict", file=path, expected="a dict", found=type(value).__name__)
    tensors: dict[str, AnyTensor] = {}
    left_out: list[LeftOut] = []
    for name, item in cast(Mapping[object, object], value).items():
        if not isinstance(name, str):
            raise CorruptFileError("a name in a state dict is no string", file=path, found=repr(name))
        if isinstance(item, TENSOR_TYPES):
            tensors[name] = item
        elif (kind := kind_of_tensor(item)) is not None:
            raise not_plain(name, kind, path)
        elif holds_tensor(item):
            raise UnsupportedCheckpointError(
                "a nested checkpoint where a flat state dict was expected",
                file=path,
                expected="names of tensors on the first level",
                found=f"tensors below {name!r}; keys: {', '.join(map(str, list(value)[:8]))}",
                fix="name the directory of the whole checkpoint, or save the model's state dict alone",
            )
        else:
            left_out.append(LeftOut(name=name, reason=f"not a tensor but {type(item).__name__}"))
    return tensors, left_out


def holds_tensor(value: object) -> bool:
    """Whether a tensor lies anywhere inside; also True for what is too deep to tell."""
    return _holds(value, lambda _: True)


def holds_weight(value: object) -> bool:
    """The same of a tensor that may be a weight: no counter, metric or random state."""
    return _holds(value, lambda tensor: may_be_weight(tensor.shape, tensor.dtype_name))


def _holds(value: object, wanted: Callable[[AnyTensor], bool]) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        if any(isinstance(item, TENSOR_TYPES) and wanted(item) for item in level):
            return True
        # What is referred to twice is looked at once: lists of lists can name one list billions of times.
        level = list({id(inner): inner for item in level for inner in children(item)}.values())
        if not level:
            return False
    return True


def children(value: object) -> Iterator[object]:
    """What a container, or an object of a class that is not known, holds; nothing for anything else."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif isinstance(value, Stub):
        yield from (value.args, value.kwargs, value.state, value.items, value.mapping)


def kind_of_tensor(value: object) -> str | None:
    """What kind of tensor a stub stands for, such as ``sparse`` or its class; None where it is none."""
    if not isinstance(value, Stub):
        return None
    return unsupported_tensor_kind(value) or (stub_name(value) if holds_tensor(value) else None)


def not_plain(fqn: str, kind: str, path: str) -> UnsupportedCheckpointError:
    """The refusal of a tensor whose values need more than a read."""
    return UnsupportedCheckpointError(
        "the bytes of a tensor are not its values", file=path, tensor=fqn, found=kind, fix="save it as a plain tensor"
    )


def plain_tensor(fqn: str, tensor: AnyTensor, path: str) -> LazyTensor:
    """The tensor if its bytes are its values.

    Raises:
        UnsupportedCheckpointError: it has no values here, or they need more than a read.
    """
    if isinstance(tensor, MetaTensor):
        raise UnsupportedCheckpointError(
            "a tensor on the meta device has no values", file=path, tensor=fqn, fix="save the model gathered"
        )
    if isinstance(tensor, (DTensor, ShardedTensor)):
        raise UnsupportedCheckpointError(
            "one rank's shard of a tensor, not the whole",
            file=path,
            tensor=fqn,
            found=type(tensor).__name__,
            fix="name the directory that holds all ranks' files",
        )
    if tensor.conj or tensor.neg or tensor.subclass is not None:
        raise not_plain(fqn, tensor.subclass or "conjugate or negative view", path)
    return tensor


def dtype_of(fqn: str, name: str, path: str) -> DType:
    """The dtype of that torch name.

    Raises:
        UnsupportedCheckpointError: ckptflow doesn't know it.
    """
    dtype = DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise UnsupportedCheckpointError(
            "unknown tensor dtype", file=path, tensor=fqn, expected=", ".join(DTYPES), found=name
        )
    return dtype


def may_be_weight(shape: Shape, dtype_name: str) -> bool:
    """Not a counter, a metric, or the bytes and indices of random generators and samplers."""
    dtype = DTYPES.get(dtype_name.removeprefix("torch."))
    return prod(shape) > 1 and (len(shape) > 1 or dtype is None or dtype.kind not in ("int", "bool"))


def source_of(fqn: str, tensor: AnyTensor, file: SourceFile) -> TensorSource:
    """A plain tensor of a torch file as a source."""
    plain = plain_tensor(fqn, tensor, file.path)
    dtype = dtype_of(fqn, plain.dtype_name, file.path)
    return whole(file, plain.byte_offset, plain.shape, dtype, plain.strides)


def _on_shared_storages(tensors: Mapping[str, AnyTensor]) -> list[list[tuple[str, LazyTensor]]]:
    """Tensors with elements, by storage; storages under one tensor alone, as nearly all are, are left out."""
    groups: dict[int, list[tuple[str, LazyTensor]]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, LazyTensor):
            groups.setdefault(id(tensor.storage), []).append((name, tensor))
    shared = [group for group in groups.values() if len(group) > 1]
    return [[(name, tensor) for name, tensor in group if tensor.numel] for group in shared]


def shared_windows(tensors: Mapping[str, AnyTensor]) -> dict[str, str]:
    """Alias → first name, for tensors that are one window on one storage. Empty tensors share nothing."""
    aliases: dict[str, str] = {}
    for group in _on_shared_storages(tensors):
        first: dict[object, str] = {}
        for name, tensor in group:
            window = (tensor.storage_offset, tensor.shape, tensor.strides, tensor.dtype_name)
            owner = first.setdefault(window, name)
            if owner != name:
                aliases[name] = owner
    return aliases


def refuse_placeholders(tensors: Mapping[str, TensorSource], path: Path) -> None:
    """Tensors without elements stand for weights that were not gathered before they were saved.

    Raises:
        InconsistentCheckpointError: there is one, or nothing at all.
    """
    empty = next((fqn for fqn, source in tensors.items() if not source.numel), None)
    if empty is not None:
        raise InconsistentCheckpointError(
            "a tensor without elements: a placeholder for weights that were not gathered",
            file=path,
            tensor=empty,
            found=f"shape {list(tensors[empty].shape)}",
            fix="convert the sharded files that hold its values, or save it gathered",
        )
    if not tensors:
        raise InconsistentCheckpointError("the file holds no weights", file=path)


def overlap_notes(tensors: Mapping[str, AnyTensor]) -> list[str]:
    """One sentence on tensors that share some bytes and are not ties: in the output they are apart."""
    aliases = shared_windows(tensors)
    pairs: list[str] = []
    for group in _on_shared_storages(tensors):
        windows = [
            (tensor.byte_offset, tensor.byte_offset + tensor.extent_bytes, name)
            for name, tensor in group
            if tensor.is_contiguous and name not in aliases
        ]
        reached, owner = 0, ""
        for begin, end, name in sorted(windows):
            if begin < reached:
                pairs.append(f"{owner} and {name}")
            if end > reached:
                reached, owner = end, name
    more = f" and {len(pairs) - 4} more pairs" if len(pairs) > 4 else ""
    shared = "; each is written with bytes of its own, so that they no longer share any"
    return [f"tensors overlap in one storage: {', '.join(pairs[:4])}{more}{shared}"] if pairs else []


def fills_storage(tensor: LazyTensor) -> bool:
    """Whether a tensor is its storage: all of it, in order."""
    return tensor.nbytes == tensor.storage.nbytes and tensor.is_contiguous


def storage_use(tensors: Iterable[LazyTensor]) -> tuple[int, int]:
    """Bytes of all storages under the tensors, and how many of them no tensor's extent covers."""
    full: dict[int, int] = {}
    windows: dict[int, tuple[LazyStorage, list[tuple[int, int]]]] = {}
    for tensor in tensors:
        storage = tensor.storage
        if fills_storage(tensor):
            full[id(storage)] = storage.nbytes
            continue
        start = tensor.byte_offset - storage.offset
        windows.setdefault(id(storage), (storage, []))[1].append((start, start + tensor.extent_bytes))
    partial = [(storage.nbytes, _covered(spans)) for key, (storage, spans) in windows.items() if key not in full]
    total, used = sum(nbytes for nbytes, _ in partial), sum(used for _, used in partial)
    return sum(full.values()) + total, total - used


def _covered(spans: list[tuple[int, int]]) -> int:
    covered = reached = 0
    for start, stop in sorted(spans):
        covered += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return covered
