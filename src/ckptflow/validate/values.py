"""Every element of the output against torch's own cast of the source.

The output is read by the safetensors library, the source by a second reader: neither path was taken by the writer.
Tensors are compared in boxes, by several threads; their number and size are bounded by a budget of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from math import isfinite, prod
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ckptflow.plan import PlannedTensor
from ckptflow.processes.pools import windowed
from ckptflow.tensors import Shape
from ckptflow.validate.lora import fold_rows, read_factors, ulps
from ckptflow.validate.report import Check, Figure, RoundingHistogram, listing
from ckptflow.validate.reread.base import boxes, window_of

if TYPE_CHECKING:
    import torch

    from ckptflow.validate.reread.choose import SourceReader

BYTES_PER_ELEMENT = 48
"""Source, cast, output, float64 copies and index tensors of one element, at worst."""
BOX_ELEMENTS = 1 << 19
"""What is made of so many stays in a core's cache from one step to the next."""
HISTOGRAM_BINS = 32
SAMPLE_ELEMENTS = 1 << 16
"""Of each tensor."""

ReadBox = Callable[[Shape, Shape], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor to compare.

    Attributes:
        fqn: its name in the output.
        shape: of both.
        read: gives boxes of the source, from any thread.
    """

    fqn: str
    shape: Shape
    read: ReadBox


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """What a cast did to the elements of a box.

    Attributes:
        cast_from: torch's name of the source's dtype.
        largest: error of a finite element.
        coarsest: the largest relative error that rounding to nearest makes of a normal number.
        counts: elements of the sample by relative error, in equal bins up to ``coarsest``.
        exact: elements of the sample that were not changed.
        sampled: elements in the sample.
    """

    cast_from: str
    largest: float
    coarsest: float
    counts: Sequence[int]
    exact: int
    sampled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxResult:
    """One box of a tensor, compared.

    Attributes:
        elements: how many.
        nbytes: of the output.
        differing: elements whose bits are not those of the source.
        first: the first of them, for people.
        rounding: None where nothing was cast.
    """

    elements: int
    nbytes: int
    differing: int = 0
    first: str = ""
    rounding: Rounding | None = None


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

    def add(self, fqn: str, boxes: Sequence[BoxResult]) -> None:
        """Count a tensor, whose boxes come in order."""
        elements, differing = sum(box.elements for box in boxes), sum(box.differing for box in boxes)
        self.tensors += 1
        self.elements += elements
        self.differing += differing
        if differing:
            first = next(box.first for box in boxes if box.differing)
            self.problems.append(f"{fqn}: {differing} of {elements} elements differ, {first}")
        for rounding in (box.rounding for box in boxes):
            if rounding is not None:
                self._add_rounding(fqn, rounding)

    def _add_rounding(self, fqn: str, rounding: Rounding) -> None:
        self.cast_from.add(rounding.cast_from)
        if rounding.largest > self.largest_error:
            self.largest_error, self.largest_error_in = rounding.largest, fqn
        self.coarsest = max(self.coarsest, rounding.coarsest)
        self.counts = [sum(pair) for pair in zip(self.counts, rounding.counts, strict=True)]
        self.exact += rounding.exact
        self.sampled += rounding.sampled


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a comparison may take: threads, and bytes of buffers."""

    threads: int
    memory_budget_bytes: int


def compare_box(found: torch.Tensor, source: torch.Tensor, offsets: Shape, sample_step: int) -> BoxResult:
    """Compare a box bit for bit with torch's cast of its source, and measure the rounding.

    Args:
        found: the box of the output.
        source: the same box of the source, in the source's dtype.
        offsets: where it lies in the tensor.
        sample_step: one of so many elements is in the sample of rounding errors.
    """
    wanted = source if source.dtype == found.dtype else source.to(found.dtype)
    differing, at = _differences(found, wanted)
    first = ""
    if differing:
        where = [o + i for o, i in zip(offsets, at, strict=True)]
        first = f"first at {where}: {found[tuple(at)].item()!r} instead of {wanted[tuple(at)].item()!r}"
    is_cast = source.dtype != found.dtype and found.dtype.is_floating_point
    return BoxResult(
        elements=found.numel(),
        nbytes=found.nbytes,
        differing=differing,
        first=first,
        rounding=_measure(source, found, sample_step) if is_cast else None,
    )


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


def _measure(source: torch.Tensor, found: torch.Tensor, step: int) -> Rounding:
    import torch

    wide = torch.float64 if source.dtype == torch.float64 else torch.float32
    values = source.to(wide).flatten()
    error = (found.to(wide).flatten() - values).abs_()
    largest = float(error.max())
    if not isfinite(largest):
        largest = float(error.nan_to_num(0.0, 0.0, 0.0).max())
    values, error = values[::step], error[::step]
    changed = (error > 0) & error.isfinite()
    relative = (error[changed] / values[changed].abs()).float()
    # Rounding to nearest moves a normal number by at most half the distance to its neighbour.
    coarsest = torch.finfo(found.dtype).eps / 2
    bins = (relative / coarsest * HISTOGRAM_BINS).clamp(0, HISTOGRAM_BINS - 1).long()
    return Rounding(
        cast_from=str(source.dtype).removeprefix("torch."),
        largest=largest,
        coarsest=coarsest,
        counts=torch.bincount(bins, minlength=HISTOGRAM_BINS).tolist(),
        exact=int((error == 0).sum()),
        sampled=len(values),
    )


def compare_tensors(
    result: Comparison,
    all_wanted: Iterable[Wanted],
    output: BoxReader,
    limits: Limits,
    progress: Callable[[int], None],
) -> None:
    """Compare tensors bit for bit with their sources.

    Args:
        result: what is found is added to it.
        all_wanted: the tensors.
        output: read by this thread alone, in the order of ``all_wanted``.
        limits: threads that compare, and memory.
        progress: told the bytes of output that were compared.
    """
    window = limits.threads + 2
    most = min(BOX_ELEMENTS, max(1024, limits.memory_budget_bytes // BYTES_PER_ELEMENT // window))

    def items() -> Iterator[tuple[Wanted, Shape, torch.Tensor, Shape]]:
        for wanted in all_wanted:
            if not prod(wanted.shape):
                result.add(wanted.fqn, [])
            for offsets, sizes in boxes(wanted.shape, most):
                yield wanted, offsets, output.read(wanted.fqn, offsets, sizes), sizes

    def work(item: tuple[Wanted, Shape, torch.Tensor, Shape]) -> tuple[str, BoxResult]:
        wanted, offsets, found, sizes = item
        step = -(-prod(wanted.shape) // SAMPLE_ELEMENTS)
        return wanted.fqn, compare_box(found, wanted.read(offsets, sizes), offsets, step)

    with one_thread_each(), ThreadPoolExecutor(limits.threads, "ckptflow-compare") as pool:
        for fqn, group in groupby(windowed(pool, work, items(), window), key=itemgetter(0)):
            found = []
            for _, box in group:
                progress(box.nbytes)
                found.append(box)
            result.add(fqn, found)


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Each of torch's operations runs in the thread that calls it: more are worth less than boxes side by side."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    nbytes = prod(shape) * tensor.dtype.itemsize
    result.add(tensor.fqn, [BoxResult(elements=prod(shape), nbytes=nbytes, differing=differing, first=where)])


def _rows(shape: Shape, first: int, step: int) -> tuple[Shape, Shape]:
    rest = shape[1:]
    return (first, *(0,) * len(rest)), (min(step, shape[0] - first), *rest)


def compare_plan(
    planned: Sequence[PlannedTensor],
    output: BoxReader,
    source: SourceReader,
    limits: Limits,
    progress: Callable[[int], None],
) -> Comparison:
    """Compare all planned tensors with their sources; the caller has checked that the output has them in that shape."""
    result = Comparison()

    def wanted(tensor: PlannedTensor) -> Wanted:
        return Wanted(tensor.fqn, tensor.shape, partial(source.read, tensor, source.name_for(tensor)))

    for is_folded, group in groupby(planned, key=lambda tensor: tensor.fold is not None):
        if not is_folded:
            compare_tensors(result, map(wanted, group), output, limits, progress)
            continue
        most = max(1024, limits.memory_budget_bytes // BYTES_PER_ELEMENT)
        for tensor in group:
            compare_folded(result, tensor, partial(output.read, tensor.fqn), wanted(tensor).read, most)
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
