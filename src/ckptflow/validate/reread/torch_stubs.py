"""Rank files through ``torch.load(weights_only=True)``, with inert classes in place of torch.distributed's own.

torch's own DeviceMesh, DTensor and ShardedTensor moved between releases, and some refuse to be loaded without a process
group. What is needed of them is plain data, so every class is replaced by one that only keeps its state. So are
DeepSpeed's classes, which torch does not know, and those of Megatron's args.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DTENSOR = (
    "torch.distributed.tensor.DTensor",
    "torch.distributed._tensor.api.DTensor",
    "torch.distributed._tensor.DTensor",
)
SHARDED_TENSOR = ("torch.distributed._shard.sharded_tensor.api.ShardedTensor",)
PLACEMENT_MODULES = ("torch.distributed.tensor.placement_types", "torch.distributed._tensor.placement_types")
PLACEMENTS = ("Shard", "_StridedShard", "Replicate", "Partial", "_Partial")
PLAIN = (
    *(f"{module}.{name}" for module in PLACEMENT_MODULES for name in ("DTensorSpec", "TensorMeta")),
    *(f"torch.distributed.tensor._dtensor_spec.{name}" for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")),
    "torch.fx.passes.shape_prop.TensorMetadata",
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed._tensor.device_mesh.DeviceMesh",
    "torch.distributed._mesh_layout._MeshLayout",
    "torch.distributed._mesh_layout._FlatLayout",
    "torch.distributed._shard.metadata.ShardMetadata",
    "torch.distributed._shard.sharded_tensor.shard.Shard",
    "torch.distributed._shard.sharded_tensor.metadata.ShardedTensorMetadata",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
    "torch.distributed.remote_device._remote_device",
)
DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)

# torchao's classes around weights that are trained as they are; what they hold, and where.
TRAINING_WRAPPERS = {
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": "_tensor",
    "torchao.prototype.moe_training.tensor.Float8TrainingWeightWrapperTensor": "_data",
    "torchao.prototype.moe_training.tensor.MXFP8TrainingWeightWrapperTensor": "_data",
    "torchao.prototype.moe_training.tensor.ScaledGroupedMMTensor": "_data",
    "torchao.prototype.quantized_training.int8_mixed_precision.Int8MixedPrecisionTrainingLinearWeight": "_data",
}


_SAFE_GLOBALS = threading.Lock()
"""torch has one set for all threads."""


class Inert:
    """Keeps what a pickle gives it and does nothing."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.state: dict[str, Any] = {}

    def __new__(cls, *arguments: object) -> Inert:
        made = super().__new__(cls)
        made.arguments, made.state = arguments, {}
        return made

    def __setstate__(self, state: Any) -> None:
        if _is_slots(state):
            self.state = _slots(state)
        elif isinstance(state, dict):
            self.state = state

    def __hash__(self) -> int:
        return id(self)


def _is_slots(state: Any) -> bool:
    """Objects with slots are pickled as (dict or None, dict)."""
    return isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict)


def _slots(state: tuple[dict[str, Any] | None, dict[str, Any]]) -> dict[str, Any]:
    return {**(state[0] or {}), **state[1]}


def _placement(name: str) -> type[Inert]:
    return type(f"Inert{name}", (Inert,), {"kind": name})


def load_rank_file(path: Path) -> dict[str, Any]:
    """The state dict of one rank; tensor data is mapped, not read.

    Raises:
        pickle.UnpicklingError, RuntimeError: torch refuses the file.
    """
    wrapped = _wrapped_tensor()

    def inert_attribute(*_: object) -> type[Inert]:
        return Inert  # ShardedTensor.ProcessGroupState, a nested class

    allowed: list[Any] = [(wrapped, name) for name in (*DTENSOR, *SHARDED_TENSOR)]
    allowed += [(Inert, name) for name in PLAIN]
    allowed += [(inert_attribute, "__builtin__.getattr"), (inert_attribute, "builtins.getattr")]
    for placement in PLACEMENTS:
        stub = _placement(placement)
        allowed += [(stub, f"{module}.{placement}") for module in PLACEMENT_MODULES]
    try:
        return _load(path, allowed)
    except pickle.UnpicklingError:
        of_torchao = _of_torchao(path, wrapped)
        if not of_torchao:
            raise
    return _load(path, [*allowed, *of_torchao])


def load_plain(source: Path | IO[bytes], *, mmap: bool = False) -> Any:
    """A torch file of nothing but what torch allows, and torchao's classes around weights: see ``trained_values``.

    Raises:
        pickle.UnpicklingError, RuntimeError: torch refuses the file.
    """
    import torch

    try:
        return torch.load(source, map_location="cpu", mmap=mmap, weights_only=True)
    except pickle.UnpicklingError:
        allowed = _of_torchao(source, _wrapped_tensor())
        if not allowed:
            raise
    if not isinstance(source, Path):
        source.seek(0)
    with _only_safe_globals(allowed):
        return torch.load(source, map_location="cpu", mmap=mmap, weights_only=True)


def _wrapped_tensor() -> type:
    import torch

    class WrappedTensor(torch.Tensor):
        """A tensor subclass whose parts are kept as attributes: DTensor, ShardedTensor or one of torchao's."""

        def __setstate__(self, state: Any) -> None:
            self.parts = _slots(state) if _is_slots(state) else state

        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        @classmethod
        def __torch_dispatch__(cls, *_: object, **__: object) -> None:
            raise NotImplementedError  # it has no values of its own to compute with

    return WrappedTensor


def _of_torchao(source: Path | IO[bytes], wrapped: type) -> list[Any]:
    import torch

    if not isinstance(source, Path):
        source.seek(0)
    names = [n for n in torch.serialization.get_unsafe_globals_in_checkpoint(source) if n.startswith("torchao.")]
    if not any(name in TRAINING_WRAPPERS for name in names):
        return []
    return [(wrapped if name in TRAINING_WRAPPERS else Inert, name) for name in names]


def load_deepspeed_file(path: Path) -> dict[str, Any]:
    """The model or optimizer states of one DeepSpeed file; tensor data is mapped, not read.

    Raises:
        pickle.UnpicklingError, RuntimeError: torch refuses the file.
    """
    return _load(path, [(Inert, name) for name in DEEPSPEED])


def load_universal_file(path: Path) -> torch.Tensor:
    """The parameter of one file of a universal checkpoint: its ``param``, or all of it.

    Raises:
        pickle.UnpicklingError, RuntimeError: torch refuses the file, or it holds no tensor.
    """
    import torch

    value = _load_any(path, [])
    tensor = value.get("param") if isinstance(value, dict) else value
    if not isinstance(tensor, torch.Tensor):
        raise RuntimeError(f"{path.name} holds a {type(tensor).__name__}, not a tensor")
    return tensor.detach()


def load_with_stubs(path: Path) -> dict[str, Any]:
    """A torch file with whatever beside its tensors; all classes that torch does not allow are inert.

    Raises:
        pickle.UnpicklingError, RuntimeError: torch refuses the file.
    """
    import torch

    return _load(path, [(Inert, name) for name in torch.serialization.get_unsafe_globals_in_checkpoint(path)])


def _load(path: Path, allowed: list[Any]) -> dict[str, Any]:
    loaded = _load_any(path, allowed)
    if not isinstance(loaded, dict):
        raise RuntimeError(f"{path.name} holds a {type(loaded).__name__}, not a state dict")
    return dict(loaded)


def _load_any(path: Path, allowed: list[Any]) -> object:
    import torch

    with _only_safe_globals(allowed):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


@contextmanager
def _only_safe_globals(allowed: list[Any]) -> Iterator[None]:
    """torch.distributed allows its own classes once it is imported; under one name torch keeps either, by chance."""
    import torch

    with _SAFE_GLOBALS:
        before = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        try:
            torch.serialization.add_safe_globals(allowed)
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


def parts_of(value: torch.Tensor) -> Any:
    """State of a DTensor (dict) or a ShardedTensor (tuple); None for a plain tensor."""
    return getattr(value, "parts", None)


def trained_values(value: torch.Tensor) -> torch.Tensor:
    """What one of torchao's wrappers holds; any other tensor as it is."""
    parts = parts_of(value)
    kept = [parts[name] for name in TRAINING_WRAPPERS.values() if name in parts] if isinstance(parts, dict) else []
    return kept[0] if kept else value
