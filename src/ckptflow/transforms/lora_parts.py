"""The tensors of a plan by what they are to PEFT: base weights, LoRA layers, modules trained as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

from ckptflow.errors import InconsistentCheckpointError, UnsupportedCheckpointError
from ckptflow.manifest import AdapterSpec
from ckptflow.plan import ConsolidationPlan, PlannedTensor
from ckptflow.tensors import TensorSource
from ckptflow.transforms.lora_names import LoraPart, Original, Part, SavedModule, role_of

_Key = TypeVar("_Key", Part, str)


@dataclass(slots=True)
class WrappedPlan:
    """A plan's tensors, sorted.

    Attributes:
        base: FQN in the base model → tensor.
        layers: adapted module → the tensors of its LoRA layer.
        saved: FQN in the base model → the adapter's trained copy.
        originals: FQN in the base model → the untrained copy of a module that was trained as a whole.
        ties: alias → owner, FQNs in the base model; the alias is in ``base`` too.
    """

    base: dict[str, PlannedTensor] = field(default_factory=dict)
    layers: dict[str, dict[Part, PlannedTensor]] = field(default_factory=dict)
    saved: dict[str, PlannedTensor] = field(default_factory=dict)
    originals: dict[str, PlannedTensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)


def sort_out(plan: ConsolidationPlan, spec: AdapterSpec) -> WrappedPlan:
    """Sort a plan's tensors by their names.

    Raises:
        InconsistentCheckpointError: two tensors have one meaning, or one of the adapter's is empty.
        UnsupportedCheckpointError: several adapters, or another method than LoRA.
    """
    wrapped = WrappedPlan()
    by_fqn = {t.fqn: t for t in plan.tensors}
    aliases = [replace(by_fqn[owner], fqn=alias, source_fqns=(alias,)) for alias, owner in plan.ties.items()]
    adapter: str | None = None
    fqns: dict[str, str] = {}
    for tensor in (*plan.tensors, *aliases):
        role = role_of(tensor.fqn, spec.prefix, spec.separate)
        if isinstance(role, (LoraPart, SavedModule)):
            refuse_empty(tensor.fqn, tensor.source)
            if role.adapter is not None and adapter not in (None, role.adapter):
                raise UnsupportedCheckpointError(
                    "several adapters in one checkpoint",
                    tensor=tensor.fqn,
                    found=f"{adapter} and {role.adapter}",
                    fix="save one adapter at a time",
                )
            adapter = adapter or role.adapter
        if isinstance(role, LoraPart):
            _put(wrapped.layers.setdefault(role.module, {}), role.part, tensor)
        elif isinstance(role, SavedModule):
            _put(wrapped.saved, role.fqn, tensor)
        elif isinstance(role, Original):
            _put(wrapped.originals, role.fqn, tensor)
        else:
            _put(wrapped.base, role.fqn, tensor)
            fqns[tensor.fqn] = role.fqn
    wrapped.ties = {fqns[a]: fqns[o] for a, o in plan.ties.items() if a in fqns and o in fqns}
    return wrapped


def _put(into: dict[_Key, PlannedTensor], key: _Key, tensor: PlannedTensor) -> None:
    other = into.setdefault(key, tensor)
    if other is not tensor:
        raise InconsistentCheckpointError(
            "two tensors of an adapter have one meaning", tensor=tensor.fqn, found=f"{other.fqn} too"
        )


def refuse_empty(fqn: str, source: TensorSource) -> None:
    """Refuse a tensor of an adapter that has no elements, as ZeRO-3 without gathering leaves it.

    Raises:
        InconsistentCheckpointError: it has none.
    """
    if source.numel == 0:
        raise InconsistentCheckpointError(
            "an empty tensor in an adapter: its shards were not gathered before it was saved",
            tensor=fqn,
            found=f"shape {list(source.shape)}",
            fix="save the adapter with gathered parameters",
        )
