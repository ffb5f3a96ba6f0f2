"""MXNet's ``.params`` files through a mapping of numpy; sparse arrays are made dense by torch.

Source: ``NDArray::Save`` and ``TShape::Save`` of MXNet 1.9 (src/ndarray/ndarray.cc, include/mxnet/tuple.h).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptflow.tensors import Shape
from ckptflow.validate.reread.base import UncoveredError, window_of

if TYPE_CHECKING:
    import numpy as np
    import torch

LIST_MAGIC = 0x112
# The word that an array begins with: the ndim of the oldest layout, or one of these.
INT64_SHAPES, STORAGE_TYPES, NUMPY_SHAPES = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
DENSE, ROW_SPARSE, CSR = 0, 1, 2
INDEX_ARRAYS = {DENSE: 0, ROW_SPARSE: 1, CSR: 2}
# By the number of the dtype in the file. numpy has no bfloat16: torch views the last one's integers as such.
NUMPY_DTYPES = ("f4", "f8", "f2", "u1", "i4", "i1", "i8", "?", "i2", "u2", "u4", "u8", "i2")
BFLOAT16 = 12
KIND = re.compile("^(?:arg|aux):")


class MXNetRereader:
    """The named arrays of one file.

    Raises:
        UncoveredError: no list of named arrays that this reader knows.
    """

    how = "a mapping of the file by numpy"

    def __init__(self, path: Path) -> None:
        walk = _Walk(path)
        if walk.numbers("u8", 2) != [LIST_MAGIC, 0]:
            raise UncoveredError("MXNet files that are no list of arrays")
        (count,) = walk.numbers("u8", 1)
        arrays = [walk.array() for _ in range(count)]
        (named,) = walk.numbers("u8", 1)
        names = [bytes(walk.take(size)).decode() for _ in range(named) for size in walk.numbers("u8", 1)]
        # Module tells weights and auxiliary states apart by a prefix, which are one model.
        plain = [KIND.sub("", name) for name in names]
        self._arrays = {name: array for name, array in zip(plain, arrays, strict=True) if array is not None}

    def shape(self, fqn: str) -> Shape | None:
        return self._arrays[fqn].shape if fqn in self._arrays else None

    def read(self, fqn: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        return self._arrays[fqn].box(offsets, sizes)


class _Array:
    """One array: ``values`` are all of it, or the stored ones, which ``indices`` place."""

    def __init__(self, storage: int, shape: Shape, values: torch.Tensor, indices: Sequence[torch.Tensor]) -> None:
        self.shape = shape
        self._storage, self._values, self._indices = storage, values, indices

    def box(self, offsets: Shape, sizes: Shape) -> torch.Tensor:
        window = window_of(offsets, sizes)
        return self._values[window] if self._storage == DENSE else self._rows(window[0])[:, *window[1:]]

    def _rows(self, rows: slice) -> torch.Tensor:
        """Some whole rows of a sparse array."""
        import torch

        dense = torch.zeros((rows.stop - rows.start, *self.shape[1:]), dtype=self._values.dtype)
        if self._storage == ROW_SPARSE:
            (stored,) = self._indices
            inside = (stored >= rows.start) & (stored < rows.stop)
            dense[stored[inside] - rows.start] = self._values[inside]
        elif self._values.numel():
            bounds, columns = self._indices
            for row in range(rows.start, rows.stop):
                own = slice(int(bounds[row]), int(bounds[row + 1]))
                dense[row - rows.start, columns[own]] = self._values[own]
        return dense


class _Walk:
    """Goes through a file from its begin to its end."""

    def __init__(self, path: Path) -> None:
        import numpy as np

        self._content: np.ndarray[Any, Any] = np.memmap(path, dtype="u1", mode="c")
        self._at = 0

    def take(self, nbytes: int) -> np.ndarray[Any, Any]:
        found = self._content[self._at : self._at + nbytes]
        if len(found) != nbytes:
            raise UncoveredError("MXNet files that end too early")
        self._at += nbytes
        return found

    def numbers(self, dtype: str, count: int) -> list[int]:
        import numpy as np

        kind = np.dtype(f"<{dtype}")
        return [int(number) for number in np.frombuffer(self.take(count * kind.itemsize).tobytes(), kind)]

    def array(self) -> _Array | None:
        """The next array; None for one that never got a shape."""
        (magic,) = self.numbers("u4", 1)
        storage, stored_shape = DENSE, None
        if magic in (STORAGE_TYPES, NUMPY_SHAPES):
            (storage,) = self.numbers("i4", 1)
            stored_shape = self._shape() if storage != DENSE else None
        shape = tuple(self.numbers("u4", magic)) if magic < INT64_SHAPES else self._shape()
        if shape is None or (not shape and magic != NUMPY_SHAPES):
            return None
        *_, dtype = self.numbers("i4", 3)  # the first two name a device
        kinds = [(self.numbers("i4", 1)[0], self._shape() or ()) for _ in range(INDEX_ARRAYS[storage])]
        values = self._block(dtype, shape if storage == DENSE else stored_shape or ())
        return _Array(storage, shape, values, [self._block(*kind).long() for kind in kinds])

    def _shape(self) -> Shape | None:
        """None where it is not known."""
        (ndim,) = self.numbers("i4", 1)
        dims = tuple(self.numbers("i8", max(ndim, 0)))
        return None if ndim < 0 or -1 in dims else dims

    def _block(self, dtype: int, shape: Shape) -> torch.Tensor:
        import numpy as np
        import torch

        kind = np.dtype(f"<{NUMPY_DTYPES[dtype]}")
        raw = self.take(prod(shape) * kind.itemsize)
        if not len(raw):
            return torch.from_numpy(np.empty(shape, kind))
        block = torch.from_numpy(np.ndarray(shape, kind, buffer=raw))
        return block.view(torch.bfloat16) if dtype == BFLOAT16 else block
