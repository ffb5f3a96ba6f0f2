"""Reads a tensor source with plain numpy, piece by piece: what tests compare readers with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ckptflow.dtypes import numpy_dtype
from ckptflow.formats.base import ReadOptions
from ckptflow.formats.registry import locate, read
from ckptflow.manifest import CheckpointManifest
from ckptflow.plan import PlannedTensor
from ckptflow.tensors import TensorSource, check_tiling


def read_source(source: TensorSource) -> np.ndarray[Any, Any]:
    """The dense tensor; proves on the way that its pieces fill it."""
    check_tiling("tensor", source)
    dtype = numpy_dtype(source.dtype)
    out = np.zeros(source.shape, dtype)
    for piece in source.pieces:
        span = sum((n - 1) * s for n, s in zip(piece.sizes, piece.strides, strict=True)) + 1
        flat = np.fromfile(piece.file.path, dtype, count=span, offset=piece.offset_bytes)
        strides = [s * dtype.itemsize for s in piece.strides]
        box = np.lib.stride_tricks.as_strided(flat, piece.sizes, strides)
        out[tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))] = box
    return out


def assert_same_bits(got: Mapping[str, TensorSource], expected: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Names, shapes, dtypes and bits are the same."""
    assert set(got) == set(expected)
    for fqn, source in got.items():
        values = read_source(source)
        assert values.shape == expected[fqn].shape, fqn
        assert values.dtype == expected[fqn].dtype, fqn
        assert values.tobytes() == expected[fqn].tobytes(), fqn


def as_numpy(tensors: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """torch tensors as numpy arrays of the same bits."""
    import torch

    arrays = {}
    for fqn, tensor in tensors.items():
        dense = tensor.detach().contiguous()
        raw = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        from ckptflow.dtypes import dtype_named

        arrays[fqn] = np.frombuffer(raw, numpy_dtype(dtype_named(str(dense.dtype)))).reshape(tuple(dense.shape))
    return arrays


def folded_values(tensor: PlannedTensor) -> np.ndarray[Any, Any]:
    """The formulas of the papers, in float64."""
    base, fold = read_source(tensor.source).astype(np.float64), tensor.fold
    if fold is None:
        return base
    b = read_source(fold.b).astype(np.float64)
    if fold.a is None:
        return base + fold.scale * b
    a = read_source(fold.a).astype(np.float64)
    update = b.reshape(len(b), -1) @ a.reshape(len(a), -1)
    update = update.T if fold.transposed else update.reshape(base.shape)
    result = base + fold.scale * update
    if fold.magnitude is not None:
        rows = result.T if fold.transposed else result
        norm = np.sqrt((rows.reshape(len(rows), -1) ** 2).sum(1))
        factor = read_source(fold.magnitude).astype(np.float64).reshape(-1) / norm
        rows = rows * factor.reshape(-1, *[1] * (rows.ndim - 1))
        result = rows.T if fold.transposed else rows
    return result


def manifest_of(path: Path) -> CheckpointManifest:
    """What is read of a checkpoint that needs no options."""
    return read(locate(path), ReadOptions())
