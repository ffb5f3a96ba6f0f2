"""A torch file that holds one model's state dict, flat or under one key, with optimizer and trainer state beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ckptflow.errors import CorruptFileError, UnsupportedCheckpointError
from ckptflow.formats.files import checked_file
from ckptflow.formats.state_names import NUMBER, OPTIMIZER_STATE, PARAM_GROUPS, RNG_NAME, STATE_NAMES
from ckptflow.formats.torch_tensors import (
    TENSOR_TYPES,
    children,
    holds_tensor,
    holds_weight,
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

KeyPath = tuple[str, ...]


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
    file: SourceFile, torch: TorchFile, top: Mapping[str, object], at: KeyPath, reasons: Mapping[str, str]
) -> StateDictFile:
    """The weights in the dict ``at``, and what lies beside it.

    Args:
        file: the file.
        torch: its content.
        top: the content's top level.
        at: keys that lead to the state dict from the top level, which is ``()``.
        reasons: key → why it is left out, for those that are known.
    """
    value: object = top
    beside: list[tuple[str, str, object]] = []
    for depth, key in enumerate(at):
        level = cast("Mapping[str, object]", value)
        beside += [(".".join([*at[:depth], str(k)]), str(k), item) for k, item in level.items() if k != key]
        value = level[key]
    entries, others = state_dict_entries(value, file.path)
    plain = {name: plain_tensor(name, tensor, file.path) for name, tensor in entries.items()}
    if not plain:
        raise CorruptFileError("the state dict holds no tensors", file=file.path, found=", ".join(list(top)[:8]))
    aliases = shared_windows(plain)
    names = model_names(plain)
    weights = {id(tensor.storage) for tensor in plain.values()}
    _, wasted = storage_use(plain.values())
    return StateDictFile(
        file=file,
        torch=torch,
        tensors={names[name]: source_of(name, t, file) for name, t in plain.items() if name not in aliases},
        ties={names[alias]: names[owner] for alias, owner in aliases.items()},
        left_out=(*others, *(_left_out(name, item, weights, reasons.get(key)) for name, key, item in beside)),
        storage_bytes=sum(storage.nbytes for storage in torch.storages),
        wasted_bytes=wasted,
        notes=tuple(overlap_notes(plain)),
    )


def find_state_dict(top: Mapping[str, object], keys: tuple[str, ...], path: str) -> KeyPath:
    """Where the model's state dict is: ``()`` for the top level, or the one of ``keys`` that holds tensors.

    Under any other name it is the only dict that may hold weights (Fabric saves what a person calls ``net``). It may
    lie inside another dict, as ``{"app": {"model": …, "optim": …}}``, the way in which DCP's tutorial saves, if nothing
    beside that one but training state holds weights.

    Raises:
        UnsupportedCheckpointError: none or several of them do.
    """
    at: KeyPath = ()
    level = top
    for _ in range(MAX_DEPTH):
        beside = [item for item in level.values() if isinstance(item, TENSOR_TYPES)]
        trained = any(may_be_weight(item.shape, item.dtype_name) for item in beside)
        found = [key for key in keys if isinstance(level.get(key), Mapping) and holds_tensor(level[key])]
        # The last loss and random states lie as tensors beside the model's dict.
        if len(found) == 1 and not trained:
            return (*at, found[0])
        holders = [key for key, item in level.items() if not _is_training_state(key, level) and holds_weight(item)]
        if not at and (trained or (beside and not holders)):
            return ()
        if at and holders and all(isinstance(level[key], TENSOR_TYPES) for key in holders):
            return at
        inner = level[holders[0]] if len(holders) == 1 else None
        if not isinstance(inner, Mapping) or not all(isinstance(key, str) for key in inner):
            break
        at, level = (*at, holders[0]), cast("Mapping[str, object]", inner)
    found = [key for key in keys if isinstance(top.get(key), Mapping) and holds_tensor(top[key])]
    raise UnsupportedCheckpointError(
        "a torch file that is not a model's state dict",
        file=path,
        expected=f"tensors on the top level, or under one of {', '.join(keys)}",
        found=f"under {', '.join(found)}" if found else f"keys: {', '.join(list(top)[:8])}",
        fix="name the directory of the checkpoint, or save the model's state dict alone",
    )


def _is_training_state(key: str, level: Mapping[str, object]) -> bool:
    """Whether an entry of ``level`` is no model: by its name, or as a state dict of torch.optim or a part of one."""
    value = level[key]
    poured_out = PARAM_GROUPS in level and key in (OPTIMIZER_STATE, PARAM_GROUPS)
    if poured_out or (isinstance(value, Mapping) and PARAM_GROUPS in value):
        return True
    name = NUMBER.sub("", key)
    return name in STATE_NAMES or name.startswith("ema") or RNG_NAME.fullmatch(name) is not None


def _left_out(name: str, value: object, weights: set[int], reason: str | None) -> LeftOut:
    storages = {id(t.storage): t.storage.nbytes for t in _tensors(value) if id(t.storage) not in weights}
    return LeftOut(name=name, reason=reason or "not the model's state dict", nbytes=sum(storages.values()))


def _tensors(value: object) -> Iterator[LazyTensor]:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        yield from (item for item in level if isinstance(item, LazyTensor))
        level = list({id(inner): inner for item in level for inner in children(item)}.values())
