"""The fallback: bytes at the places that ckptflow's own manifest names, copied by a plain walk with numpy.

It proves the engine (casting, gathering, threads, files), not the reader that made the manifest; reports say so.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from ckptflow.dtypes import numpy_dtype
from ckptflow.errors import InconsistentCheckpointError
from ckptflow.tensors import Piece, Shape, TensorSource

if TYPE_CHECKING:
    import torch

HOW = "ckptflow's manifest and a plain walk over its pieces"


def read_box(fqn: str, source: TensorSource, offsets: Shape, sizes: Shape) -> torch.Tensor:
    """The box ``[offsets, offsets + sizes)`` of a source, gathered in one thread.

    Raises:
        InconsistentCheckpointError: the pieces leave a gap or overlap in the box.
    """
    import numpy as np
    import torch

    integer = np.dtype(f"u{source.dtype.itemsize}") if source.dtype.itemsize <= 8 else numpy_dtype(source.dtype)
    box = np.empty(sizes, dtype=integer)
    filled = 0
    for piece in source.pieces:
        low = [max(a, b) for a, b in zip(piece.offsets, offsets, strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(piece.offsets, piece.sizes, offsets, sizes, strict=True)]
        if any(h <= lo for lo, h in zip(low, high, strict=True)):
            continue
        count = [h - lo for lo, h in zip(low, high, strict=True)]
        place = tuple(slice(lo - b, h - b) for lo, h, b in zip(low, high, offsets, strict=True))
        box[place] = _window(piece, source.dtype.itemsize, low, count).view(integer)
        filled += prod(count)
    if filled != prod(sizes):
        raise InconsistentCheckpointError(
            "the pieces of a tensor leave a gap or overlap", tensor=fqn, expected=prod(sizes), found=filled
        )
    raw = torch.from_numpy(box.reshape(-1).view(np.uint8))
    dtype: torch.dtype = getattr(torch, source.dtype.name)
    return raw.view(dtype).reshape(sizes)


def _window(piece: Piece, itemsize: int, low: list[int], count: list[int]) -> np.ndarray:  # type: ignore[name-defined] # noqa: F821
    import numpy as np

    begin = piece.offset_bytes + itemsize * sum(
        (lo - a) * step for lo, a, step in zip(low, piece.offsets, piece.strides, strict=True)
    )
    extent = 1 + sum((n - 1) * step for n, step in zip(count, piece.strides, strict=True))
    data = np.memmap(Path(piece.file.path), dtype=np.uint8, mode="r", offset=begin, shape=(extent * itemsize,))
    flat = np.frombuffer(data, dtype=np.dtype(f"V{itemsize}"))
    return np.lib.stride_tricks.as_strided(flat, count, [step * itemsize for step in piece.strides], writeable=False)
