"""Which part of a saved state dict is the model, told by the nested paths that DCP's planner recorded.

People save ``{"model": …, "optim": …}``, ``{"app": {"model": …}}``, or the model's keys at the top level beside
``optimizer`` and ``train_state`` (torchtitan). The recorded path says which dict a key was in; dots in a key don't.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NoReturn

from ckptflow.errors import AmbiguousCheckpointError, CorruptFileError, UnsupportedCheckpointError
from ckptflow.formats.dcp_metadata import DcpMetadata, TreePath
from ckptflow.manifest import LeftOut
from ckptflow.transforms.fqn import model_names

# What trainers call the dict that holds the weights, at any depth above it.
MODEL_NAMES = frozenset({"model", "module", "models", "network", "state_dict", "model_state_dict", "model_state"})
# Training state that is never weights, and what it is.
STATE_NAMES = {
    "optim": "optimizer state",
    "optimizer": "optimizer state",
    "optimizers": "optimizer state",
    "optimizer_states": "optimizer state",
    "optimizer_state_dict": "optimizer state",
    "lr_scheduler": "learning rate schedule",
    "lr_schedulers": "learning rate schedule",
    "scheduler": "learning rate schedule",
    "dataloader": "position in the training data",
    "dataset": "position in the training data",
    "train_state": "training counters",
    "trainer_state": "training counters",
    "rng": "random number generator state",
    "rng_state": "random number generator state",
    "rng_states": "random number generator state",
    "grad_scaler": "loss scale",
    "scaler": "loss scale",
    "ema": "moving average of the weights, not the weights themselves",
    "extra_state": "training state",
}
# Lightning numbers its optimizers: optimizer_0.
NUMBER = re.compile(r"_\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKeys:
    """The model's part of a checkpoint.

    Attributes:
        root: path of the dict that holds the model; empty for the top level.
        fqns: FQN inside that dict → flat key of the checkpoint.
        left_out: everything else, one entry per part.
    """

    root: TreePath
    fqns: Mapping[str, str]
    left_out: tuple[LeftOut, ...]


def find_model(metadata: DcpMetadata, path: str) -> ModelKeys:
    """The tensors of the model under their own names; ``path`` is for messages.

    Raises:
        AmbiguousCheckpointError: several parts could be the model.
        UnsupportedCheckpointError: no part is.
    """
    trees = {key: metadata.path_of(key) for key in metadata.tensors}
    root = _root(trees, metadata, path)
    fqns: dict[str, str] = {}
    for key, tree in trees.items():
        inner = tree[len(root) :]
        if tree[: len(root)] != root or not inner or (not _is_model(root) and state_name(inner)):
            continue
        name = ".".join(map(str, inner))
        if name in fqns:
            raise CorruptFileError("two entries of the checkpoint have one name", file=path, tensor=name, found=key)
        fqns[name] = key
    fqns = {short: fqns[name] for name, short in model_names(fqns).items()}
    return ModelKeys(root=root, fqns=fqns, left_out=tuple(_left_out(metadata, root, set(fqns.values()))))


def state_name(tree: TreePath) -> str | None:
    """What the training state at this path is; None for anything that may be weights."""
    first = str(tree[0]) if tree else ""
    if len(tree) == 1:  # a flat dict keeps the nesting in the key's dots
        first = first.partition(".")[0]
    return STATE_NAMES.get(NUMBER.sub("", first))


def _is_model(root: TreePath) -> bool:
    return bool(root) and root[-1] in MODEL_NAMES


def _root(trees: Mapping[str, TreePath], metadata: DcpMetadata, path: str) -> TreePath:
    root: TreePath = ()
    while True:
        depth = len(root)
        below = {k: t for k, t in trees.items() if t[:depth] == root and len(t) > depth and not state_name(t[depth:])}
        leaves = [k for k, t in below.items() if len(t) == depth + 1 and prod(metadata.tensors[k].shape) > 1]
        children = sorted({str(t[depth]) for t in below.values() if len(t) > depth + 1})
        named = [child for child in children if child in MODEL_NAMES]
        others = [child for child in children if child not in MODEL_NAMES and not child.startswith("ema")]
        if len(named) == 1 and not others and not leaves:
            root = (*root, named[0])
            if _is_state_dict(root, trees):
                return root
        elif leaves and not named:
            return root
        elif len(others) == 1 and not named:
            root = (*root, next(t[depth] for t in below.values() if len(t) > depth + 1 and str(t[depth]) == others[0]))
        else:
            _no_single_model(path, [*children, *leaves[:3]])


def _is_state_dict(root: TreePath, trees: Mapping[str, TreePath]) -> bool:
    """Whether a dict of a model's name holds its tensors, and not just ``{"model": …}`` again."""
    names = {str(t[len(root)]) for t in trees.values() if t[: len(root)] == root and len(t) > len(root)}
    return not names <= MODEL_NAMES | STATE_NAMES.keys()


def _no_single_model(path: str, choices: list[str]) -> NoReturn:
    if choices:
        raise AmbiguousCheckpointError(
            "several parts of the checkpoint could be the model",
            file=path,
            expected="one dict called model, or the model's keys at the top level",
            found=", ".join(choices),
        )
    raise UnsupportedCheckpointError("no model in this checkpoint", file=path, found="training state only")


def _left_out(metadata: DcpMetadata, root: TreePath, taken: set[str]) -> Iterable[LeftOut]:
    """One entry per part of the training state, one per stray key."""
    counts: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    sizes = {key: tensor.record_bytes for key, tensor in metadata.tensors.items()}
    sizes.update({key: record.nbytes for key, record in metadata.blobs.items()})
    for key, size in sizes.items():
        if key in taken:
            continue
        name, reason = _part_of(key, metadata.path_of(key), root, key in metadata.blobs)
        reasons[name] = reason
        counts[name] += 1
        nbytes[name] += size
    for name, reason in reasons.items():
        number = f" ({counts[name]} entries)" if counts[name] > 1 else ""
        yield LeftOut(name=name, reason=reason + number, nbytes=nbytes[name])


def _part_of(key: str, tree: TreePath, root: TreePath, is_blob: bool) -> tuple[str, str]:
    """Name under which a key is listed as left out, and why it is."""
    shared = 0
    while shared < min(len(root), len(tree) - 1) and tree[shared] == root[shared]:
        shared += 1
    state = None if shared == len(root) and _is_model(root) else state_name(tree[shared:])
    if state:
        top = str(tree[shared]) if len(tree) > shared + 1 else str(tree[shared]).partition(".")[0]
        return ".".join([*map(str, root[:shared]), top, "*"]), state
    if is_blob:
        return key, "not a tensor"
    return key, "outside the model's part of the checkpoint"
