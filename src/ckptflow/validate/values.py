"""Every element of the output against torch's own cast of the source.

The output is read by the safetensors library, the source by a second reader: neither path was taken by the writer.
Memory is bounded by a budget: tensors are compared in boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ckptflow.plan import PlannedTensor
from ckptflow.tensors import Shape
from ckptflow.validate.lora import fold_rows, read_factors, ulps
from ckptflow.validate.report import Check, Figure, RoundingHistogram, listing
from ckptflow.validate.reread.base import boxes, window_of

if TYPE_CHECKING:
    import torch

    from ckptflow.validate.reread.choose import SourceReader

BYTES_PER_ELEMENT = 48
"""Source, cast, output, float64 copies and index tensors of one element, at worst."""
HISTOGRAM_BINS = 32
SAMPLE_ELEMENTS = 1 << 18

ReadBox = Callable[[Shape, Shape], "torch.Tensor"]


@dataclass(slots=True)
class Comparison:
    """What was counted so far."""

    tensors: int = 0
    elements: int = 0
    differing: int = 0
    folded: int = 0
    largest_error: float = 0.0
    largest_error_in: str = ""
    largest_ulps: float = 0.0
    cast_from: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=lambda: [0] * HISTOGRAM_BINS)
    coarsest: float = 0.0
    exact: int = 0
    sampled: int = 0

    def histogram(self) -> RoundingHistogram | None:
        """The rounding errors that were sampled; None where nothing was cast."""
        if not self.sampled:
            return None
        edges = tuple(self.coarsest * i / HISTOGRAM_BINS for i in range(HISTOGRAM_BINS + 1))
        return RoundingHistogram(edges=edges, counts=tuple(self.counts), exact=self.exact, sampled=self.sampled)


class BoxReader(Protocol):
    """Tensors of the output, box by box, in their own dtype."""

    def read(self, fqn: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        """The box ``[offsets, offsets + sizes)`` of a tensor."""


class OutputReader:
    """The output's tensors through the safetensors library."""

    def __init__(self, files: Sequence[Path]) -> None:
        from safetensors import safe_open

        self._opened: dict[str, Any] = {}
        for path in files:
            opened = safe_open(path, framework="pt")
            names: list[str] = opened.keys()  # type: ignore[no-untyped-call]
            self._opened |= dict.fromkeys(names, opened)

    def read(self, fqn: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        """The box ``[offsets, offsets + sizes)`` of a tensor."""
        window = window_of(offsets, sizes)
        opened = self._opened[fqn]
        box: torch.Tensor = opened.get_slice(fqn)[window] if window else opened.get_tensor(fqn)
        return box


def compare_tensor(
    result: Comparison, fqn: str, shape: Shape, read_output: ReadBox, read_source: ReadBox, most_elements: int
) -> None:
    """Compare one tensor bit for bit with torch's cast of its source, and measure the rounding."""
    differing, first = 0, ""
    for offsets, sizes in boxes(shape, most_elements):
        found, source = read_output(offsets, sizes), read_source(offsets, sizes)
        wanted = source if source.dtype == found.dtype else source.to(found.dtype)
        count, at = _differences(found, wanted)
        if count and not differing:
            where = [o + i for o, i in zip(offsets, at, strict=True)]
            first = f"first at {where}: {found[tuple(at)].item()!r} instead of {wanted[tuple(at)].item()!r}"
        differing += count
        if source.dtype != found.dtype and found.dtype.is_floating_point:
            _measure(result, fqn, source, found)
    _count(result, fqn, prod(shape), differing, first)


def _count(result: Comparison, fqn: str, elements: int, differing: int, first: str) -> None:
    result.tensors += 1
    result.elements += elements
    result.differing += differing
    if differing:
        result.problems.append(f"{fqn}: {differing} of {elements} elements differ, {first}")


def _differences(found: torch.Tensor, wanted: torch.Tensor) -> tuple[int, list[int]]:
    """How many elements differ in their bits, and where the first one is; one NaN is as good as another."""
    import torch

    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.dtype.itemsize]
    a, b = found.contiguous().view(integer), wanted.contiguous().view(integer)
    if torch.equal(a, b):
        return 0, []
    unequal = a != b
    if found.dtype.is_floating_point:
        unequal &= ~(found.float().isnan() & wanted.float().isnan())
    places = unequal.nonzero()
    return len(places), [int(i) for i in places[0]] if len(places) else []


def _measure(result: Comparison, fqn: str, source: torch.Tensor, found: torch.Tensor) -> None:
    import torch

    result.cast_from.add(str(source.dtype).removeprefix("torch."))
    wide = torch.float64 if source.dtype == torch.float64 else torch.float32
    values = source.to(wide).flatten()
    error = (values - found.to(wide).flatten()).abs()
    largest = float(error.nan_to_num(0.0, 0.0, 0.0).max())
    if largest > result.largest_error:
        result.largest_error, result.largest_error_in = largest, fqn
    step = -(-len(values) // SAMPLE_ELEMENTS)
    values, error = values[::step], error[::step]
    changed = (error > 0) & error.isfinite()
    relative = (error[changed] / values[changed].abs()).float()
    # Rounding to nearest moves a normal number by at most half the distance to its neighbour.
    result.coarsest = max(result.coarsest, torch.finfo(found.dtype).eps / 2)
    bins = (relative / result.coarsest * HISTOGRAM_BINS).clamp(0, HISTOGRAM_BINS - 1).long()
    for index, count in enumerate(torch.bincount(bins, minlength=HISTOGRAM_BINS).tolist()):
        result.counts[index] += count
    result.exact += int((error == 0).sum())
    result.sampled += len(values)


def compare_folded(
    result: Comparison, tensor: PlannedTensor, read_output: ReadBox, read_source: ReadBox, most_elements: int
) -> None:
    """Compare a tensor with a folded adapter against the same fold in float64."""
    import torch

    shape, fold = tensor.shape, tensor.fold
    if fold is None or not shape:
        raise ValueError(f"{tensor.fqn} has no adapter to fold")
    columns = prod(shape[1:])
    step = max(1, most_elements // max(1, columns))

    def base_rows() -> Iterator[tuple[int, torch.Tensor]]:
        for first in range(0, shape[0], step):
            yield first, read_source(*_rows(shape, first, step)).reshape(-1, columns)

    factors = read_factors(tensor.fqn, fold, base_rows)
    differing, where = 0, ""
    for first, base in base_rows():
        found = read_output(*_rows(shape, first, step)).reshape(-1, columns)
        exact, bound = fold_rows(factors, base, first)
        unit = ulps(exact, found.dtype)
        error = (found.double() - exact).abs()
        # Where a NaN meets a bound, "not within" must win.
        outside = ~(error <= unit + bound)
        result.largest_ulps = max(result.largest_ulps, float((error / unit).nan_to_num(torch.inf).max()))
        if not differing and bool(outside.any()):
            row, column = (int(i) for i in outside.nonzero()[0])
            where = (
                f"first in row {first + row}: {found[row, column].item()!r} instead of {exact[row, column].item()!r}"
            )
        differing += int(outside.sum())
    result.folded += 1
    _count(result, tensor.fqn, prod(shape), differing, where)


def _rows(shape: Shape, first: int, step: int) -> tuple[Shape, Shape]:
    rest = shape[1:]
    return (first, *(0,) * len(rest)), (min(step, shape[0] - first), *rest)


def compare_plan(
    planned: Mapping[str, PlannedTensor],
    output: BoxReader,
    source: SourceReader,
    memory_budget_bytes: int,
    progress: Callable[[int], None],
) -> Comparison:
    """Compare all planned tensors with their sources; the caller has checked that the output has them in that shape."""
    from functools import partial

    result = Comparison()
    most = max(1024, memory_budget_bytes // BYTES_PER_ELEMENT)
    for fqn, tensor in planned.items():
        read_output = partial(output.read, fqn)
        read_source = partial(source.read, tensor, source.name_for(tensor))
        if tensor.fold is not None:
            compare_folded(result, tensor, read_output, read_source, most)
        else:
            compare_tensor(result, fqn, tensor.shape, read_output, read_source, most)
        progress(tensor.nbytes)
    return result


def values_check(result: Comparison, how: str, problems: Sequence[str] = ()) -> Check:
    """The comparison as a check."""
    figures: dict[str, Figure] = {
        "tensors compared": result.tensors,
        "elements compared": result.elements,
        "differing elements": result.differing,
        "source read through": how,
    }
    if result.cast_from:
        figures["cast from"] = ", ".join(sorted(result.cast_from))
        figures["largest rounding error"] = result.largest_error
        figures["largest rounding error in"] = result.largest_error_in
    if result.folded:
        figures["folded adapters"] = result.folded
        figures["largest distance from float64 fold in units of the last place"] = round(result.largest_ulps, 3)
    found = [*problems, *result.problems]
    if found:
        return Check(name="values", status="failed", detail=listing(found), figures=figures)
    detail = "every element is bit for bit torch's cast of the source"
    if result.folded:
        detail += (
            "; folded adapters are within one unit in the last place of the same fold in float64, plus the bound on "
            "the error of a float32 sum"
        )
    return Check(name="values", status="passed", detail=detail, figures=figures)
