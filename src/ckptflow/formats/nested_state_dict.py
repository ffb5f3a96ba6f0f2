"""A torch file that holds one model's state dict, flat or under one key, with optimizer and trainer state beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ckptflow.errors import CorruptFileError, UnsupportedCheckpointError
from ckptflow.formats.files import checked_file
from ckptflow.formats.torch_tensors import (
    TENSOR_TYPES,
    children,
    holds_tensor,
    may_be_weight,
    overlap_notes,
    plain_tensor,
    shared_windows,
    source_of,
    state_dict_entries,
    storage_use,
)
from ckptflow.manifest import LeftOut
from ckptflow.tensors import SourceFile, TensorSource
from ckptflow.torchfiles import LazyTensor, TorchFile, open_torch_file
from ckptflow.transforms.fqn import model_names

MAX_DEPTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDictFile:
    """What the file holds.

    Attributes:
        file: the file.
        torch: its content.
        tensors: FQN → source, without the parts that FSDP1, torch.compile and DDP put into names.
        ties: alias → owner: names of one window on one storage.
        left_out: everything else.
        storage_bytes: bytes of all storages in the file.
        wasted_bytes: bytes under the weights that no weight uses.
        notes: what a person should know.
    """

    file: SourceFile
    torch: TorchFile
    tensors: Mapping[str, TensorSource]
    ties: Mapping[str, str]
    left_out: tuple[LeftOut, ...]
    storage_bytes: int
    wasted_bytes: int
    notes: tuple[str, ...]


def open_mapping(path: Path, root: Path) -> tuple[SourceFile, TorchFile, Mapping[str, object]]:
    """A torch file whose content is a dict with names for keys.

    Raises:
        CheckpointError: it is incomplete, corrupt or unsafe, or holds something else.
    """
    file = checked_file(path, root)
    torch = open_torch_file(path)
    if not isinstance(torch.value, Mapping) or not all(isinstance(key, str) for key in torch.value):
        raise CorruptFileError("the file holds no state dict", file=path, found=type(torch.value).__name__)
    return file, torch, cast("Mapping[str, object]", torch.value)


def read_state_dict(
    file: SourceFile, torch: TorchFile, top: Mapping[str, object], key: str | None, reasons: Mapping[str, str]
) -> StateDictFile:
    """The weights under ``key`` (None: the file's whole content), and what lies beside them.

    Args:
        file: the file.
        torch: its content.
        top: the content's top level.
        key: where the state dict is.
        reasons: top-level key → why it is left out, for those that are known.
    """
    entries, others = state_dict_entries(top if key is None else top[key], file.path)
    plain = {name: plain_tensor(name, tensor, file.path) for name, tensor in entries.items()}
    if not plain:
        raise CorruptFileError("the state dict holds no tensors", file=file.path, found=", ".join(list(top)[:8]))
    aliases = shared_windows(plain)
    names = model_names(plain)
    weights = {id(tensor.storage) for tensor in plain.values()}
    beside = [] if key is None else [_left_out(k, v, weights, reasons) for k, v in top.items() if k != key]
    _, wasted = storage_use(plain.values())
    return StateDictFile(
        file=file,
        torch=torch,
        tensors={names[name]: source_of(name, t, file) for name, t in plain.items() if name not in aliases},
        ties={names[alias]: names[owner] for alias, owner in aliases.items()},
        left_out=(*others, *beside),
        storage_bytes=sum(storage.nbytes for storage in torch.storages),
        wasted_bytes=wasted,
        notes=tuple(overlap_notes(plain)),
    )


def choose_key(top: Mapping[str, object], keys: tuple[str, ...], path: str) -> str | None:
    """Where the model's state dict is: None for the top level itself, else the one of ``keys`` that holds tensors.

    Raises:
        UnsupportedCheckpointError: none or several of them do.
    """
    beside = [item for item in top.values() if isinstance(item, TENSOR_TYPES)]
    found = [key for key in keys if isinstance(top.get(key), Mapping) and holds_tensor(top[key])]
    # The last loss and random states lie as tensors beside the model's dict.
    if len(found) == 1 and not any(may_be_weight(item.shape, item.dtype_name) for item in beside):
        return found[0]
    if beside:
        return None
    raise UnsupportedCheckpointError(
        "a torch file that is not a model's state dict",
        file=path,
        expected=f"tensors on the top level, or under one of {', '.join(keys)}",
        found=f"under {', '.join(found)}" if found else f"keys: {', '.join(list(top)[:8])}",
        fix="name the directory of the checkpoint, or save the model's state dict alone",
    )


def _left_out(key: str, value: object, weights: set[int], reasons: Mapping[str, str]) -> LeftOut:
    storages = {id(t.storage): t.storage.nbytes for t in _tensors(value) if id(t.storage) not in weights}
    reason = reasons.get(key, "not the model's state dict")
    return LeftOut(name=key, reason=reason, nbytes=sum(storages.values()))


def _tensors(value: object) -> Iterator[LazyTensor]:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        yield from (item for item in level if isinstance(item, LazyTensor))
        level = list({id(inner): inner for item in level for inner in children(item)}.values())
