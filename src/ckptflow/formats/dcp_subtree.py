"""Which part of a saved state dict is the model, told by the nested paths that DCP's planner recorded.

People save ``{"model": …, "optim": …}``, ``{"app": {"model": …}}``, or the model's keys at the top level beside
``optimizer`` and ``train_state`` (torchtitan). The recorded path says which dict a key was in; dots in a key don't.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from ckptflow.errors import AmbiguousCheckpointError, CorruptFileError, UnsupportedCheckpointError
from ckptflow.formats.dcp_metadata import DcpMetadata, TreePath
from ckptflow.formats.state_names import (
    MODEL_NAMES,
    NUMBER,
    OPTIMIZER_STATE,
    PARAM_GROUPS,
    RNG_NAME,
    STATE_NAMES,
)
from ckptflow.formats.torch_tensors import may_be_weight
from ckptflow.manifest import LeftOut
from ckptflow.transforms.fqn import model_names

OPTIMIZER, RNG = STATE_NAMES["optimizer"], "random number generator state"
OUTSIDE = "outside the model's part of the checkpoint"


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
    states = TrainingState(metadata)
    root = _root(trees, metadata, states, path)
    fqns: dict[str, str] = {}
    for key, tree in trees.items():
        inner = tree[len(root) :]
        if tree[: len(root)] != root or not inner or (not _is_model(root) and states.name_of(tree, len(root))):
            continue
        # The parts of a model that pipeline stages hold as a list; the numbers are not in the model's names.
        parts = next((i for i, part in enumerate(inner) if not isinstance(part, int)), 0)
        name = ".".join(map(str, inner[parts:]))
        if name in fqns and parts:
            _no_single_model(path, [key, fqns[name]])
        if name in fqns:
            raise CorruptFileError("two entries of the checkpoint have one name", file=path, tensor=name, found=key)
        fqns[name] = key
    fqns = {short: fqns[name] for name, short in model_names(fqns).items()}
    return ModelKeys(root=root, fqns=fqns, left_out=tuple(_left_out(metadata, states, root, set(fqns.values()))))


class TrainingState:
    """Which dicts of a saved state dict are training state: by their names, or as torch.optim's state dicts."""

    def __init__(self, metadata: DcpMetadata) -> None:
        self._optimizers: set[TreePath] = set()
        for key in (*metadata.tensors, *metadata.blobs):
            tree = metadata.path_of(key)
            for depth, part in enumerate(tree):
                if str(part).partition(".")[0] == PARAM_GROUPS:
                    self._optimizers.add(tree[:depth])

    def name_of(self, tree: TreePath, depth: int) -> str | None:
        """What the part of ``tree`` right below the dict ``tree[:depth]`` is; None for anything that may be weights."""
        first = str(tree[depth]) if len(tree) > depth else ""
        if len(tree) == depth + 1:  # a flat dict keeps the nesting in the key's dots
            first = first.partition(".")[0]
        # An optimizer's state dict that was poured out on the top level has the model beside it there.
        if tree[:depth] in self._optimizers and (depth or first in (OPTIMIZER_STATE, PARAM_GROUPS)):
            return OPTIMIZER
        if tree[: depth + 1] in self._optimizers:
            return OPTIMIZER
        first = NUMBER.sub("", first)
        return RNG if RNG_NAME.fullmatch(first) else STATE_NAMES.get(first)

    def depth_of(self, tree: TreePath, depth: int) -> int | None:
        """How many dicts from the top the training state lies that holds ``tree``; None where it is in none.

        Args:
            tree: path of an entry.
            depth: where to begin; dicts above are not asked.
        """
        dicts = range(depth, max(len(tree) - 1, depth + 1))
        return next((at for at in dicts if self.name_of(tree, at)), None)


def _is_model(root: TreePath) -> bool:
    return bool(root) and root[-1] in MODEL_NAMES


def _root(trees: Mapping[str, TreePath], metadata: DcpMetadata, states: TrainingState, path: str) -> TreePath:
    likely = [key for key, tensor in metadata.tensors.items() if may_be_weight(tensor.shape, tensor.dtype.name)]
    weights = [trees[key] for key in likely or trees]
    root: TreePath = ()
    while True:
        depth = len(root)
        below = [t[depth:] for t in weights if t[:depth] == root and states.depth_of(t, depth) is None]
        leaves = [str(t[0]) for t in below if len(t) == 1]
        children = {str(t[0]): t[0] for t in below if len(t) > 1}
        named = [child for child in children if child in MODEL_NAMES]
        others = [child for child in children if child not in MODEL_NAMES and not child.startswith("ema")]
        if len(named) == 1 and not others and not leaves:
            root = (*root, named[0])
            if _is_state_dict(root, trees):
                return root
        elif leaves and not named:
            return root
        elif len(others) == 1 and not named:
            root = (*root, children[others[0]])
        elif not children and not leaves:
            _no_model(path, metadata)
        else:
            _no_single_model(path, [*sorted(children), *leaves[:3]])


def _is_state_dict(root: TreePath, trees: Mapping[str, TreePath]) -> bool:
    """Whether a dict of a model's name holds its tensors, and not just ``{"model": …}`` again."""
    names = {str(t[len(root)]) for t in trees.values() if t[: len(root)] == root and len(t) > len(root)}
    return not names <= MODEL_NAMES | STATE_NAMES.keys()


def _no_single_model(path: str, choices: list[str]) -> NoReturn:
    raise AmbiguousCheckpointError(
        "several parts of the checkpoint could be the model",
        file=path,
        expected="one dict called model, or the model's keys at the top level",
        found=", ".join(choices),
        fix="load it and save the model's state dict alone with torch.distributed.checkpoint",
    )


def _no_model(path: str, metadata: DcpMetadata) -> NoReturn:
    """A planner with ``flatten_state_dict=False`` pickles each dict of the state dict as a whole."""
    whole = [key for key in metadata.blobs if str(metadata.path_of(key)[-1]) in MODEL_NAMES]
    raise UnsupportedCheckpointError(
        "no model in this checkpoint",
        file=path,
        expected="tensors that are no training state",
        found=f"{', '.join(whole)} pickled as a whole, without tensors of its own" if whole else "training state only",
        fix="save it again with flatten_state_dict=True, which is the planner's default" if whole else None,
    )


def _left_out(metadata: DcpMetadata, states: TrainingState, root: TreePath, taken: set[str]) -> Iterable[LeftOut]:
    """One entry per part of the training state, one per stray key."""
    counts: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    sizes = {key: tensor.record_bytes for key, tensor in metadata.tensors.items()}
    sizes.update({key: record.nbytes for key, record in metadata.blobs.items()})
    for key, size in sizes.items():
        if key in taken:
            continue
        name, reason = _part_of(key, metadata.path_of(key), states, root, key in metadata.blobs)
        reasons[name] = reason
        counts[name] += 1
        nbytes[name] += size
    for name, reason in reasons.items():
        number = f" ({counts[name]} entries)" if counts[name] > 1 else ""
        yield LeftOut(name=name, reason=reason + number, nbytes=nbytes[name])


def _part_of(key: str, tree: TreePath, states: TrainingState, root: TreePath, is_blob: bool) -> tuple[str, str]:
    """Name under which a key is listed as left out, and why it is."""
    shared = 0
    while shared < min(len(root), len(tree) - 1) and tree[shared] == root[shared]:
        shared += 1
    at = None if shared == len(root) and _is_model(root) else states.depth_of(tree, shared)
    if at is not None:
        top = str(tree[at]) if len(tree) > at + 1 else str(tree[at]).partition(".")[0]
        return ".".join([*map(str, tree[:at]), top, "*"]), states.name_of(tree, at) or ""
    if is_blob:
        return key, "not a tensor"
    if shared < len(root) and len(tree) > shared + 1:
        return ".".join([*map(str, tree[: shared + 1]), "*"]), OUTSIDE
    return key, OUTSIDE
