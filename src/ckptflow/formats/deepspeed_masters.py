"""Names the fp32 masters of a run without ZeRO: the optimizer keeps them in lists, without names.

FP16_UnfusedOptimizer saves ``fp32_groups``, lists of tensors in the order of the param groups; FP16_Optimizer saves
``fp32_groups_flat``, one flat tensor a group (deepspeed/runtime/fp16/).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from math import prod

from ckptflow.errors import InconsistentCheckpointError
from ckptflow.formats.deepspeed_states import ModelStates
from ckptflow.formats.torch_tensors import dtype_of, source_of
from ckptflow.tensors import TensorSource, flat_pieces
from ckptflow.torchfiles import LazyTensor


class _UncertainOrder(Exception):  # noqa: N818 - never leaves this module
    """There are masters, and it is not certain which belongs to which parameter."""


def name_masters(
    model: ModelStates, aliases: Mapping[str, str], *, experts: bool
) -> tuple[dict[str, TensorSource], str | None]:
    """FQN → master, for all trained parameters; none where the optimizer keeps no masters (fp32 runs).

    Parameters are walked in the model's order and must fit the next master of exactly one group. That each master
    rounds to its parameter is proven later, bit for bit. Where the order is not certain, there are no masters but a
    note: the weights in the compute dtype are whole and right, only shorter. So it is with ``experts``: their masters
    lie in between, and are those of this rank's experts alone.

    Raises:
        InconsistentCheckpointError: there is a master without a parameter, so the module is not whole.
    """
    optimizer = model.settings.get("optimizer")
    if not isinstance(optimizer, Mapping):
        return {}, None
    names = {fqn: t for fqn, t in (model.module or {}).items() if fqn not in aliases and fqn not in model.buffer_names}
    flat, groups = optimizer.get("fp32_groups_flat"), optimizer.get("fp32_groups")
    try:
        if experts and (flat or groups):
            raise _UncertainOrder("those of the experts lie among them")
        if isinstance(flat, (list, tuple)) and flat:
            return _from_flat(model, names, flat), None
        if isinstance(groups, (list, tuple)) and groups:
            return _from_groups(model, names, groups), None
    except _UncertainOrder as error:
        return {}, f"the weights in the compute dtype are used: the fp32 masters have no names, and {error}"
    return {}, None


def _from_groups(
    model: ModelStates, names: Mapping[str, LazyTensor], groups: Sequence[object]
) -> dict[str, TensorSource]:
    queues = [deque(_tensors(group)) for group in groups]
    wanted = Counter(tensor.shape for tensor in names.values())
    if more := Counter(master.shape for queue in queues for master in queue) - wanted:
        raise _orphaned(model, f"{sum(more.values())} of them, of shapes {[list(shape) for shape in more][:4]}")
    masters: dict[str, TensorSource] = {}
    for fqn, tensor in names.items():
        fitting = [queue for queue in queues if queue and queue[0].shape == tensor.shape]
        if len(fitting) != 1:
            raise _UncertainOrder(f"{len(fitting)} of them could be {fqn}")
        masters[fqn] = source_of(fqn, fitting[0].popleft(), model.file)
    return masters


def _from_flat(model: ModelStates, names: Mapping[str, LazyTensor], flat: Sequence[object]) -> dict[str, TensorSource]:
    [vector, *more] = _tensors(flat)
    wanted = sum(tensor.numel for tensor in names.values())
    if vector.numel > wanted:
        raise _orphaned(model, f"{vector.numel} elements in masters, {wanted} in parameters")
    if more or len(vector.shape) != 1 or vector.numel != wanted or not vector.is_contiguous:
        raise _UncertainOrder("there is not one flat group with as many elements as the parameters")
    dtype = dtype_of("fp32_groups_flat", vector.dtype_name, model.file.path)
    masters: dict[str, TensorSource] = {}
    offset = vector.byte_offset
    for fqn, tensor in names.items():
        numel = prod(tensor.shape)
        pieces = flat_pieces(model.file, offset, tensor.shape, dtype, 0, numel)
        masters[fqn] = TensorSource(tensor.shape, dtype, tuple(pieces))
        offset += numel * dtype.itemsize
    return masters


def _tensors(group: object) -> list[LazyTensor]:
    items = group if isinstance(group, (list, tuple)) else [group]
    tensors = [item for item in items if isinstance(item, LazyTensor)]
    if len(tensors) != len(items):
        raise _UncertainOrder("not all of them are tensors")
    return tensors


def _orphaned(model: ModelStates, found: str) -> InconsistentCheckpointError:
    return InconsistentCheckpointError(
        "the optimizer holds fp32 masters of parameters that are not in `module`", file=model.file.path, found=found
    )
