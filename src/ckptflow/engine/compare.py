"""Prove that two sources hold the same bits: replicas, tied weights, fp32 masters and their low-precision copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptflow.dtypes import numpy_dtype
from ckptflow.engine.gather import Gatherer
from ckptflow.engine.options import EngineOptions
from ckptflow.engine.refusal import unravel
from ckptflow.engine.sources import SourceFiles
from ckptflow.engine.windows import PieceIndex
from ckptflow.errors import InconsistentCheckpointError
from ckptflow.manifest import EqualSources
from ckptflow.tensors import TensorSource

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SCRATCH_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Difference:
    element: int
    first: object
    second: object


def check_equal_sources(
    equal: Sequence[EqualSources],
    options: EngineOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Compare each pair bit for bit; where the dtypes differ, the first is cast to the second's dtype before.

    Args:
        equal: the pairs.
        options: only the memory budget matters here.
        progress: called with the number of bytes of the second source that were compared since the last call.

    Raises:
        InconsistentCheckpointError: two values differ; the message says where.
        SourceChangedError: a file is not as its metadata described it.
    """
    with SourceFiles() as files:
        for pair in equal:
            difference = _first_difference(pair.first, pair.second, files, options or EngineOptions(), progress)
            if difference is not None:
                raise _error(pair, difference)
        files.check_unchanged()


def sources_equal(first: TensorSource, second: TensorSource) -> bool:
    """Whether two sources have the same shape and bits (the first cast to the second's dtype if they differ).

    Raises:
        SourceChangedError: a file is not as its metadata described it.
    """
    if first.shape != second.shape:
        return False
    with SourceFiles() as files:
        same = _first_difference(first, second, files, EngineOptions(), None) is None
        files.check_unchanged()
    return same


def _first_difference(
    first: TensorSource,
    second: TensorSource,
    files: SourceFiles,
    options: EngineOptions,
    progress: Callable[[int], None] | None,
) -> _Difference | None:
    import numpy as np

    if first.shape != second.shape:
        return _Difference(0, f"shape {list(first.shape)}", f"shape {list(second.shape)}")
    gatherer = Gatherer(files, min(_SCRATCH_BYTES, options.memory_budget_bytes // 4), threading.Event())
    indexes = PieceIndex(first), PieceIndex(second)
    dtype, element = second.dtype, numpy_dtype(second.dtype)
    chunk = min(_CHUNK_BYTES, options.memory_budget_bytes // 4) // dtype.itemsize
    ours, theirs = np.empty(chunk, element), np.empty(chunk, element)
    for start in range(0, first.numel, chunk):
        count = min(chunk, first.numel - start)
        a, b = ours[:count], theirs[:count]
        gatherer.fill(a, first, indexes[0], start, dtype)
        gatherer.fill(b, second, indexes[1], start, dtype)
        differs = first_differing(a, b, cast=first.dtype != second.dtype)
        if differs is not None:
            return _Difference(start + differs, a[differs], b[differs])
        if progress is not None:
            progress(count * dtype.itemsize)
    return None


def first_differing(a: NDArray[Any], b: NDArray[Any], *, cast: bool) -> int | None:
    """Index of the first element with other bits; after a cast, NaN equals NaN, as payloads depend on the CPU."""
    import numpy as np

    same = a.view("u1").reshape(a.size, -1) == b.view("u1").reshape(b.size, -1)
    if same.all():
        return None
    equal = same.all(axis=1)
    if cast:
        equal |= np.isnan(a) & np.isnan(b)
    return None if equal.all() else int(np.argmin(equal))


def _error(pair: EqualSources, difference: _Difference) -> InconsistentCheckpointError:
    index = list(unravel(difference.element, pair.first.shape))
    files = {piece.file.path for source in (pair.first, pair.second) for piece in source.pieces[:1]}
    return InconsistentCheckpointError(
        f"two copies of a tensor differ: {pair.reason}",
        file=", ".join(sorted(files)),
        tensor=pair.fqn,
        expected=f"{difference.first} at index {index}",
        found=f"{difference.second}",
    )
