"""Fold LoRA adapters into base weights, tile by tile.

``W + scale * (B @ A)`` (Hu et al. 2021), for DoRA scaled by ``magnitude / norm`` of each output row (Liu et al. 2024),
as PEFT's ``merge_and_unload`` does it. All is computed in float32 (float64 for a float64 base) and rounded once.

A tile is a fixed number of whole rows counted from the tensor's first row, whatever block asks for it, so that every
sum is taken in the same order for any number of threads.
"""

from __future__ import annotations

import threading
from math import prod
from typing import TYPE_CHECKING, Any

from ckptflow.dtypes import DTYPES
from ckptflow.engine.cast import cast_kernel
from ckptflow.engine.gather import Gatherer
from ckptflow.engine.windows import PieceIndex
from ckptflow.errors import UsageError
from ckptflow.plan import LoraFold, PlannedTensor
from ckptflow.tensors import TensorSource

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TILE_ELEMENTS = 256 << 10
_FLOAT32 = DTYPES["float32"]


class FoldedTensor:
    """One tensor with its adapter, ready to give any range of the folded result.

    The base is seen as a matrix of its first dim by all others. ``left @ right`` is the unscaled update: ``B @ A``, or
    ``A.T @ B.T`` where the base is stored transposed.
    """

    def __init__(self, tensor: PlannedTensor, index: PieceIndex, gatherer: Gatherer) -> None:
        fold = _require_fold(tensor)
        self._tensor = tensor
        self._index = index
        self._scale = fold.scale
        self._work = tensor.source.dtype if tensor.source.dtype.itemsize == 8 else _FLOAT32
        self._rows, self._columns = tensor.shape[0], prod(tensor.shape[1:])
        self._tile_rows = max(1, _TILE_ELEMENTS // max(1, self._columns))
        self._left, self._right = self._factors(fold, gatherer)
        self._check_shapes()
        self._row_magnitude: NDArray[Any] | None = None
        self._column_factor: NDArray[Any] | None = None
        if fold.magnitude is not None:
            self._prepare_dora(fold, fold.magnitude, gatherer)

    def fill(self, out: NDArray[Any], start: int, gatherer: Gatherer) -> None:
        """Fill ``out`` (flat, in the tensor's output dtype) with the folded elements from ``start`` on."""
        kernel = cast_kernel(self._work, self._tensor.dtype)
        tile_elements = self._tile_rows * self._columns
        done = 0
        while done < out.size:
            tile, skipped = divmod(start + done, tile_elements)
            values = self._tile(tile, gatherer).reshape(-1)[skipped : skipped + out.size - done]
            kernel(out[done : done + values.size], values)
            done += values.size

    def _tile(self, number: int, gatherer: Gatherer) -> NDArray[Any]:
        values, first = self._sum_tile(number, gatherer), number * self._tile_rows
        import numpy as np

        with np.errstate(all="ignore"):  # a zero norm gives Inf, which the finite check names
            if self._row_magnitude is not None:
                factor = self._row_magnitude[first : first + len(values)] / np.sqrt(_squares(values, axis=1))
                values *= factor[:, None].astype(values.dtype)
            if self._column_factor is not None:
                values *= self._column_factor
        return values

    def _sum_tile(self, number: int, gatherer: Gatherer) -> NDArray[Any]:
        """``W + scale * left @ right`` for the rows of one tile."""
        import numpy as np

        first = number * self._tile_rows
        rows = min(self._tile_rows, self._rows - first)
        base = np.empty(rows * self._columns, self._work.name)
        gatherer.fill(base, self._tensor.source, self._index, first * self._columns, self._work)
        with np.errstate(all="ignore"):
            # not BLAS: its order of summation depends on the number of threads and on the CPU
            update = np.einsum("ik,kj->ij", self._left[first : first + rows], self._right, optimize=False)
            update *= np.float32(self._scale)
            values: NDArray[Any] = base.reshape(rows, self._columns)
            values += update
        return values

    def _prepare_dora(self, fold: LoraFold, magnitude: TensorSource, gatherer: Gatherer) -> None:
        """DoRA norms run over each output row: a row here, or a column (one pass more) if stored transposed."""
        import numpy as np

        vector = _flat(magnitude, gatherer)
        outputs = self._columns if fold.transposed else self._rows
        if vector.size != outputs:
            raise self._misfit("magnitude vector", f"{outputs} elements", f"{vector.size} elements")
        if not fold.transposed:
            self._row_magnitude = vector.astype(np.float64)
            return
        total = np.zeros(self._columns)
        for number in range(-(-self._rows // self._tile_rows)):
            total += _squares(self._sum_tile(number, gatherer), axis=0)
        with np.errstate(all="ignore"):
            self._column_factor = (vector / np.sqrt(total)).astype(self._work.name)

    def _factors(self, fold: LoraFold, gatherer: Gatherer) -> tuple[NDArray[Any], NDArray[Any]]:
        """Left and right factor of the update. For a bias they are its own update, and one."""
        import numpy as np

        if fold.a is None:
            return _flat(fold.b, gatherer).reshape(-1, 1), np.ones((1, 1), np.float32)
        a, b = self._matrix(fold.a, gatherer), self._matrix(fold.b, gatherer)
        return (_dense(a.T), _dense(b.T)) if fold.transposed else (b, a)

    def _matrix(self, source: TensorSource, gatherer: Gatherer) -> NDArray[Any]:
        """First dim by all others: ``[r, in, *kernel]`` to ``[r, in * kernel]``, ``[out, r, 1, 1]`` to ``[out, r]``."""
        if len(source.shape) < 2 or source.numel == 0:
            raise self._misfit("LoRA matrices", "matrices with elements", f"shape {list(source.shape)}")
        return _flat(source, gatherer).reshape(source.shape[0], -1)

    def _check_shapes(self) -> None:
        expected = f"[{self._rows}, r] @ [r, {self._columns}]"
        if self._left.shape != (self._rows, len(self._right)) or self._right.shape[1] != self._columns:
            raise self._misfit("LoRA matrices", expected, f"{list(self._left.shape)} @ {list(self._right.shape)}")

    def _misfit(self, what: str, expected: str, found: str) -> UsageError:
        return UsageError(
            f"the {what} of an adapter doesn't fit its base weight",
            tensor=self._tensor.fqn,
            expected=f"{expected} for a base of shape {list(self._tensor.shape)}",
            found=found,
            fix="the adapter belongs to another base model",
        )


class FoldedTensors:
    """The folded tensors of one weight file: each adapter is read once, and kept while blocks still need it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: dict[int, FoldedTensor] = {}

    def get(self, number: int, tensor: PlannedTensor, index: PieceIndex, gatherer: Gatherer) -> FoldedTensor:
        """The folded tensor with that number; blocks come in order, so older ones are dropped."""
        with self._lock:
            folded = self._ready.get(number)
            if folded is None:
                folded = self._ready[number] = FoldedTensor(tensor, index, gatherer)
                for old in sorted(self._ready)[:-_KEPT_FOLDS]:
                    del self._ready[old]
            return folded


_KEPT_FOLDS = 4


def _require_fold(tensor: PlannedTensor) -> LoraFold:
    if tensor.fold is None or not tensor.shape or tensor.source.dtype.kind != "float":
        raise UsageError("only floating-point weights of one dim or more take an adapter", tensor=tensor.fqn)
    return tensor.fold


def _flat(source: TensorSource, gatherer: Gatherer) -> NDArray[Any]:
    import numpy as np

    values = np.empty(source.numel, np.float32)
    gatherer.fill(values, source, PieceIndex(source), 0, _FLOAT32)
    return values


def _dense(values: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    return np.ascontiguousarray(values)


def _squares(values: NDArray[Any], axis: int) -> NDArray[Any]:
    """Sums of squares in float64."""
    import numpy as np

    sums: NDArray[Any] = np.square(values, dtype=np.float64).sum(axis=axis)
    return sums
