"""Torch's functions that pickles call: each makes a lazy tensor or a record, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NoReturn

from ckptflow.torchfiles.builders import Builder, Stand
from ckptflow.torchfiles.distributed import RecordBuilder
from ckptflow.torchfiles.dtypes import TorchDtype
from ckptflow.torchfiles.lazy import MAX_DIMS, LazyStorage, LazyTensor, MetaTensor, Sealed
from ckptflow.torchfiles.records import DTensor
from ckptflow.torchfiles.stubs import merged_state, stub_name

_PLAIN_TENSOR_TYPES: Final = frozenset({"torch.Tensor", "torch.nn.parameter.Buffer"})
_PARAMETER_TYPES: Final = frozenset(
    {"torch.nn.parameter.Parameter", "torch.nn.Parameter", "torch.nn.parameter.UninitializedParameter"}
)
# Weights that are trained in their own dtype and rounded anew in each forward pass, in a tensor class that says how:
# class → the attribute that holds them as they are. FSDP2 shards them under these classes, and so they are saved.
_TRAINING_WRAPPERS: Final = {
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": "_tensor",
    "torchao.prototype.moe_training.tensor.Float8TrainingWeightWrapperTensor": "_data",
    "torchao.prototype.moe_training.tensor.MXFP8TrainingWeightWrapperTensor": "_data",
    "torchao.prototype.moe_training.tensor.ScaledGroupedMMTensor": "_data",
    "torchao.prototype.quantized_training.int8_mixed_precision.Int8MixedPrecisionTrainingLinearWeight": "_data",
}


class RebuildTensor(Sealed):
    """``torch._utils._rebuild_tensor`` and ``_rebuild_tensor_v2``; a class of its own, for it is called most."""

    __slots__ = ("_shared",)

    def __init__(self) -> None:
        # Models have thousands of tensors and dozens of shapes.
        self._shared: dict[tuple[int, ...], tuple[int, ...]] = {}

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError("a function can't be changed")

    def __call__(
        self,
        storage: object,
        storage_offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        requires_grad: object = False,
        backward_hooks: object = None,
        metadata: object = None,
    ) -> LazyTensor:
        if type(storage) is not LazyStorage or len(size) > MAX_DIMS or len(stride) > MAX_DIMS:
            raise TypeError("a tensor has no storage, or too many dims")
        dtype_name = storage.dtype_name or "uint8"
        if metadata:
            return flagged(storage, dtype_name, storage_offset, size, stride, requires_grad, metadata)
        shape, strides = tuple(size), tuple(stride)
        shape, strides = self._shared.setdefault(shape, shape), self._shared.setdefault(strides, strides)
        return LazyTensor(storage, dtype_name, storage_offset, shape, strides, requires_grad is True)


def flagged(
    storage: LazyStorage,
    dtype_name: str,
    storage_offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: object,
    metadata: object,
) -> LazyTensor:
    """A tensor whose values are to be read conjugated or negated."""
    flags = metadata if isinstance(metadata, dict) else {}
    unknown = set(flags) - {"conj", "neg"}
    if unknown:
        raise TypeError(f"a tensor has unknown flags {unknown}")
    return LazyTensor(
        storage,
        dtype_name,
        storage_offset,
        tuple(size),
        tuple(stride),
        requires_grad is True,
        conj=bool(flags.get("conj")),
        neg=bool(flags.get("neg")),
    )


class _Wrapper:
    """What ``_rebuild_wrapper_subclass`` gives: a tensor subclass without storage, before its state is known."""

    __slots__ = ("dtype", "requires_grad", "size")

    def __init__(self, dtype: object, size: object, requires_grad: bool) -> None:
        self.dtype, self.size, self.requires_grad = dtype, size, requires_grad

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError("a tensor can't be changed")


class TorchBuilders:
    """The functions of ``torch`` that pickles call."""

    def __init__(self, records: RecordBuilder, stand: Stand) -> None:
        self._records = records
        self._stand = stand

    def table(self) -> dict[tuple[str, str], object]:
        """(module, name) → builder."""
        tensor, from_type = RebuildTensor(), Builder(self._from_type)
        return {
            ("torch._utils", "_rebuild_tensor"): tensor,
            ("torch._utils", "_rebuild_tensor_v2"): tensor,
            ("torch._utils", "_rebuild_tensor_v3"): Builder(self._tensor_v3),
            ("torch._utils", "_rebuild_parameter"): Builder(_parameter),
            ("torch._utils", "_rebuild_parameter_with_state"): Builder(_parameter),
            ("torch._utils", "_rebuild_meta_tensor_no_storage"): Builder(self._meta_tensor),
            ("torch._utils", "_rebuild_wrapper_subclass"): Builder(self._wrapper),
            ("torch._tensor", "_rebuild_from_type"): from_type,
            ("torch._tensor", "_rebuild_from_type_v2"): from_type,
            ("torch.tensor", "_rebuild_from_type"): from_type,
            ("torch.serialization", "_get_layout"): Builder(_layout),
            ("torch", "device"): Builder(_device),
            ("torch", "Size"): Builder(_size),
        }

    def _tensor_v3(
        self,
        storage: object,
        storage_offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        requires_grad: object,
        backward_hooks: object,
        dtype: object,
        metadata: object = None,
    ) -> object:
        if type(storage) is not LazyStorage or len(size) > MAX_DIMS or len(stride) > MAX_DIMS:
            raise TypeError("a tensor has no storage, or too many dims")
        if not isinstance(dtype, TorchDtype):
            # A dtype without a known element size (torch.int4, torch.bits8…): kept as a stub, refused when used.
            stub = self._stand("torch._utils", "_rebuild_tensor_v3")
            return stub(storage, storage_offset, size, stride, requires_grad, backward_hooks, dtype)
        return flagged(storage, dtype.name, storage_offset, size, stride, requires_grad, metadata)

    def _meta_tensor(self, dtype: object, size: object, stride: object, requires_grad: object) -> MetaTensor:
        if not isinstance(dtype, TorchDtype):
            raise TypeError("a meta tensor has no dtype")
        return MetaTensor(dtype.name, _size(size), requires_grad is True)

    def _wrapper(self, cls: object, dtype: object = None, size: object = None, *args: object) -> _Wrapper:
        # The requires_grad flag has been the last argument in all releases.
        return _Wrapper(dtype, size, bool(args) and args[-1] is True)

    def _from_type(self, function: object, new_type: object, args: object, state: object) -> object:
        if not callable(function) or not isinstance(args, tuple):
            raise TypeError("a tensor subclass is rebuilt without a function")
        value = function(*args)
        name = stub_name(new_type)
        if isinstance(value, LazyTensor):
            if name in _PLAIN_TENSOR_TYPES:
                return value
            if name in _PARAMETER_TYPES:
                return value.as_parameter(requires_grad=value.requires_grad)
            return value.as_subclass(name)
        if not isinstance(value, _Wrapper):
            return value
        module, _, kind = name.rpartition(".")
        if module.startswith("torch.distributed") and kind == "DTensor":
            return self._records.dtensor(state, value.requires_grad)
        if module.startswith("torch.distributed") and kind == "ShardedTensor":
            return self._records.sharded_tensor(state, value.requires_grad)
        stub = self._stand(module, kind)()
        stub.__setstate__(state)
        return _trained_values(name, value, merged_state(state)) or stub


def _trained_values(name: str, wrapper: _Wrapper, state: Mapping[str, object]) -> LazyTensor | None:
    """What is in a wrapper that is known to leave values as they are; None for any other, and where the two differ."""
    inner = state.get(_TRAINING_WRAPPERS.get(name, ""))
    dtype = wrapper.dtype.name if isinstance(wrapper.dtype, TorchDtype) else None
    if not isinstance(inner, LazyTensor) or (inner.dtype_name, inner.shape) != (dtype, wrapper.size):
        return None
    return inner


def _parameter(data: object, requires_grad: object = True, hooks: object = None, state: object = None) -> object:
    if isinstance(data, LazyTensor | DTensor):
        return data.as_parameter(requires_grad=requires_grad is True)
    return data


def _layout(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError("a layout has no name")
    return name


def _device(kind: object, index: object = None) -> str:
    if not isinstance(kind, str) or not (index is None or type(index) is int):
        raise TypeError("a device has no name")
    return kind if index is None else f"{kind}:{index}"


def _size(values: object = ()) -> tuple[int, ...]:
    if (
        not isinstance(values, tuple | list)
        or len(values) > MAX_DIMS
        or not all(type(value) is int for value in values)
    ):
        raise TypeError("a size isn't a short list of integers")
    return tuple(values)
