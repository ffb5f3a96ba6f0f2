"""Folded adapters, recomputed with torch in float64.

``W + scale * (B @ A)`` (Hu et al. 2021), for DoRA ``magnitude * V / ||V||`` with the norm over each output row of that
sum (Liu et al. 2024, as PEFT merges it). A float32 product differs from this in its last bits, so the result is not
compared bit for bit: it must be within one unit in the last place of the output dtype, plus the bound on the error of
a float32 sum of r products (Higham 2002, §3.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptflow.plan import LoraFold
from ckptflow.tensors import TensorSource
from ckptflow.validate.reread.pieces import read_box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

FLOAT32_EPSILON = 2.0**-23


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldFactors:
    """An adapter in float64: the update is ``scale * left @ right`` for a base seen as [rows, columns]."""

    left: torch.Tensor
    right: torch.Tensor
    scale: float
    row_magnitude: torch.Tensor | None
    column_factor: torch.Tensor | None


def read_factors(fqn: str, fold: LoraFold, base_rows: Callable[[], Iterable[tuple[int, torch.Tensor]]]) -> FoldFactors:
    """Load an adapter.

    Args:
        fqn: the folded tensor, for messages.
        fold: the adapter's sources.
        base_rows: (first row, rows [n, columns] of the base) from top to bottom; needed for DoRA on transposed bases.
    """
    import torch

    b = _matrix(fqn, fold.b)
    # A bias takes ``b`` as it is: one column, times one.
    a = torch.ones(1, 1, dtype=torch.float64) if fold.a is None else _matrix(fqn, fold.a)
    left, right = (a.T, b.T) if fold.transposed else (b, a)
    if fold.magnitude is None:
        return FoldFactors(left=left, right=right, scale=fold.scale, row_magnitude=None, column_factor=None)
    magnitude = _matrix(fqn, fold.magnitude).flatten()
    if not fold.transposed:
        return FoldFactors(left=left, right=right, scale=fold.scale, row_magnitude=magnitude, column_factor=None)
    squares = torch.zeros(right.shape[1], dtype=torch.float64)
    for first, rows in base_rows():
        squares += (rows.double() + fold.scale * (left[first : first + len(rows)] @ right)).square().sum(0)
    factor = magnitude / squares.sqrt()
    return FoldFactors(left=left, right=right, scale=fold.scale, row_magnitude=None, column_factor=factor)


def _matrix(fqn: str, source: TensorSource) -> torch.Tensor:
    whole = read_box(fqn, source, (0,) * len(source.shape), source.shape)
    return whole.reshape(source.shape[0], -1).double()


def fold_rows(factors: FoldFactors, base: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The folded rows in float64, and the bound on the error of doing the same in the base's precision.

    Args:
        factors: the adapter.
        base: rows of the base weight from ``first`` on, [n, columns].
        first: the number of the first row.
    """
    left = factors.left[first : first + len(base)]
    base = base.double()
    exact = base + factors.scale * (left @ factors.right)
    size = base.abs() + abs(factors.scale) * (left.abs() @ factors.right.abs())
    bound = FLOAT32_EPSILON * (factors.right.shape[0] + 3) * size
    if factors.row_magnitude is not None:
        norm = exact.square().sum(1, keepdim=True).sqrt()
        factor = factors.row_magnitude[first : first + len(base), None] / norm
    elif factors.column_factor is not None:
        factor = factors.column_factor[None, :]
    else:
        return exact, bound
    # The norm, too, comes from sums that are a little off: relative, by no more than the row's own relative error.
    slack = FLOAT32_EPSILON * (factors.right.shape[0] + 8) * exact.abs()
    return exact * factor, (bound + slack) * factor.abs() * 2


def ulps(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance between neighbours of ``dtype`` around each value."""
    import torch

    info = torch.finfo(dtype)
    exponent = torch.frexp(exact.abs()).exponent.double() - 1
    return torch.exp2(exponent).clamp_min(info.smallest_normal) * info.eps
