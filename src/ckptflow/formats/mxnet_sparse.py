"""Row-sparse and csr arrays as dense tensors: stored values are pieces, and so is what lies between them.

A missing row is a piece with strides 0 on eight zero bytes that every ``.params`` file holds, so the engine needs to
know nothing of sparse storage.
"""

from __future__ import annotations

import os
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from ckptflow.dtypes import numpy_dtype
from ckptflow.errors import CorruptFileError, SourceChangedError, UnsafeFileError, UnsupportedCheckpointError
from ckptflow.formats.mxnet_params import ZERO_BYTES_OFFSET, NDArray, StoredArray
from ckptflow.tensors import Piece, Shape, SourceFile, TensorSource, contiguous_strides

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray as Numbers

# A few stored rows may stand for a tensor of any size; this bounds what a small file can make us write.
_MAX_GROWTH = 4096
_ALWAYS_ALLOWED_BYTES = 2**30
_MAX_PIECES = 2_000_000


def dense_source(file: SourceFile, name: str, array: NDArray) -> TensorSource:
    """The dense tensor that a sparse array stands for.

    Raises:
        CorruptFileError: its indices are out of range, out of order, or don't fit its values.
        UnsafeFileError: it would grow absurdly.
        UnsupportedCheckpointError: it has too many runs of stored values.
    """
    nbytes = prod(array.shape) * array.values.dtype.itemsize
    if nbytes > max(_ALWAYS_ALLOWED_BYTES, _MAX_GROWTH * file.nbytes):
        raise UnsafeFileError(
            "a sparse array would grow absurdly when made dense",
            file=file.path,
            tensor=name,
            found=f"{nbytes} bytes for shape {list(array.shape)} in a file of {file.nbytes} bytes",
        )
    if not array.shape:
        raise _misfit(file, name, "at least one dim", "a scalar")
    pieces = _row_sparse(file, name, array) if array.storage == "row_sparse" else _csr(file, name, array)
    return TensorSource(array.shape, array.values.dtype, tuple(pieces))


def _row_sparse(file: SourceFile, name: str, array: NDArray) -> list[Piece]:
    rows = _read_indices(file, name, array.indices[0], array.shape[0])
    row_shape, values = array.shape[1:], array.values
    if len(rows) and (values.shape[:1] != (len(rows),) or values.shape[1:] != row_shape):
        raise _misfit(file, name, f"{len(rows)} rows of shape {list(row_shape)}", list(values.shape))
    if prod(array.shape) == 0:
        return []
    row_bytes = prod(row_shape) * values.dtype.itemsize
    pieces: list[Piece] = []
    # Runs are at most twice the stored rows, each of which has its bytes in the file: no bound is needed.
    for first, stop, stored in _runs(file, name, rows, array.shape[0]):
        offsets, sizes = (first, *(0 for _ in row_shape)), (stop - first, *row_shape)
        if stored is None:
            pieces.append(_zeros(file, offsets, sizes))
        else:
            at = values.offset_bytes + stored * row_bytes
            pieces.append(Piece(file, at, contiguous_strides(array.shape), offsets, sizes))
    return pieces


def _csr(file: SourceFile, name: str, array: NDArray) -> list[Piece]:
    if len(array.shape) != 2:
        raise _misfit(file, name, "a matrix", f"shape {list(array.shape)}")
    rows, columns = array.shape
    if prod(array.shape) == 0:
        return []
    stored = prod(array.values.shape)
    bounds = _read_numbers(file, array.indices[0])
    if not stored:
        return [_zeros(file, (0, 0), array.shape)]
    numbers = _read_indices(file, name, array.indices[1], columns)
    if len(bounds) != rows + 1 or bounds[0] != 0 or bounds[-1] != stored or (bounds[1:] < bounds[:-1]).any():
        raise _misfit(file, name, f"indptr of {rows + 1} ascending numbers up to {stored}", f"{len(bounds)} numbers")
    if len(numbers) != stored:
        raise _misfit(file, name, f"{stored} column numbers", len(numbers))
    pieces: list[Piece] = []
    for row, (begin, end) in enumerate(pairwise(bounds.tolist())):
        for first, stop, index in _runs(file, name, numbers[begin:end], columns):
            if index is None:
                pieces.append(_zeros(file, (row, first), (1, stop - first)))
                continue
            at = array.values.offset_bytes + (begin + index) * array.values.dtype.itemsize
            pieces.append(Piece(file, at, (columns, 1), (row, first), (1, stop - first)))
        if len(pieces) > _MAX_PIECES:
            raise UnsupportedCheckpointError(
                "a csr array has too many separate entries",
                file=file.path,
                tensor=name,
                expected=f"at most {_MAX_PIECES} runs of stored or missing values",
                fix="save it dense: array.tostype('default')",
            )
    return pieces


def _runs(file: SourceFile, name: str, indices: Numbers[np.int64], size: int) -> list[tuple[int, int, int | None]]:
    """Cut ``[0, size)`` into runs ``(first, stop, position of first in indices)``; position None: nothing stored."""
    import numpy as np

    if (np.diff(indices) <= 0).any():
        raise _misfit(file, name, "ascending indices without repeats", "repeated or unsorted ones")
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    starts = [0, *breaks.tolist()] if len(indices) else []
    stops = [*breaks.tolist(), len(indices)] if len(indices) else []
    runs: list[tuple[int, int, int | None]] = []
    done = 0
    for start, stop in zip(starts, stops, strict=True):
        first, end = int(indices[start]), int(indices[stop - 1]) + 1
        if first > done:
            runs.append((done, first, None))
        runs.append((first, end, start))
        done = end
    if done < size:
        runs.append((done, size, None))
    return runs


def _read_indices(file: SourceFile, name: str, stored: StoredArray, limit: int) -> Numbers[np.int64]:
    numbers = _read_numbers(file, stored)
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= limit):
        raise _misfit(file, name, f"indices below {limit}", f"{numbers.min()} to {numbers.max()}")
    return numbers


def _read_numbers(file: SourceFile, stored: StoredArray) -> Numbers[np.int64]:
    import numpy as np

    if stored.dtype.kind != "int":
        raise CorruptFileError("the indices of a sparse array are not integers", file=file.path, found=stored.dtype)
    nbytes = prod(stored.shape) * stored.dtype.itemsize
    with open(file.path, "rb") as stream:
        stream.seek(stored.offset_bytes)
        data = stream.read(nbytes)
        if os.fstat(stream.fileno()).st_mtime_ns != file.mtime_ns or len(data) != nbytes:
            raise SourceChangedError("the file changed while it was read", file=file.path)
    return np.frombuffer(data, dtype=numpy_dtype(stored.dtype)).astype(np.int64)


def _zeros(file: SourceFile, offsets: Shape, sizes: Shape) -> Piece:
    return Piece(file, ZERO_BYTES_OFFSET, (0,) * len(sizes), offsets, sizes)


def _misfit(file: SourceFile, name: str, expected: object, found: object) -> CorruptFileError:
    return CorruptFileError(
        "the indices of a sparse array don't fit it", file=file.path, tensor=name, expected=expected, found=found
    )
