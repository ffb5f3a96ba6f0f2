"""The error for values that must not be published: which element, and who made it so."""

from __future__ import annotations

from math import isfinite
from typing import NoReturn

from ckptflow.engine.gather import Gatherer
from ckptflow.engine.windows import PieceIndex
from ckptflow.errors import ValueRefusedError
from ckptflow.plan import PlannedTensor
from ckptflow.tensors import Shape


def refuse_nonfinite(tensor: PlannedTensor, index: PieceIndex, element: int, gatherer: Gatherer) -> NoReturn:
    """Look at the source of a NaN or Inf that was about to be written, and refuse it.

    Args:
        tensor: the tensor that holds it.
        index: the tensor's pieces.
        element: flat index of the first such element.
        gatherer: reads the one source element.

    Raises:
        ValueRefusedError: always.
    """
    value = read_element(tensor, index, element, gatherer)
    at = list(unravel(element, tensor.shape))
    if not isfinite(abs(value)):
        what, found = "a tensor holds NaN or Inf", f"{value} at index {at}"
        fix = "publish an earlier step; --allow-nonfinite writes the values as they are"
    elif tensor.fold is not None:
        what, found = "folding an adapter gives NaN or Inf", f"base {value} at index {at}"
        fix = "check the adapter and its alpha; --allow-nonfinite writes the values as they are"
    else:
        what = f"a value overflows in the cast from {tensor.source.dtype} to {tensor.dtype}"
        found = f"{value} at index {at}"
        fix = f"write bfloat16 or float32, or keep this tensor's dtype (--keep-dtype '{tensor.fqn}')"
    path = index.piece_at(element).file.path
    raise ValueRefusedError(what, file=path, tensor=tensor.fqn, expected="finite values", found=found, fix=fix)


def read_element(tensor: PlannedTensor, index: PieceIndex, element: int, gatherer: Gatherer) -> float | complex:
    """One element of the source, in its own dtype, as a Python number."""
    import numpy as np

    from ckptflow.dtypes import numpy_dtype

    source = tensor.source
    value = np.empty(1, numpy_dtype(source.dtype))
    gatherer.fill(value, source, index, element, source.dtype)
    return complex(value[0]) if source.dtype.kind == "complex" else float(value[0])


def unravel(element: int, shape: Shape) -> Shape:
    """The index in each dim of a flat index."""
    index = []
    for size in reversed(shape):
        element, rest = divmod(element, size)
        index.append(rest)
    return tuple(reversed(index))
