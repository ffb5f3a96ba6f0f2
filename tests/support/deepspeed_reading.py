"""Reads DeepSpeed folders, and holds what was read against torch's tensors bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ckptflow.dtypes import numpy_dtype
from ckptflow.formats.base import ReadOptions
from ckptflow.formats.deepspeed import DeepSpeedCheckpoint
from ckptflow.manifest import CheckpointManifest
from reading import read_source

FORMAT = DeepSpeedCheckpoint()


def read(path: Path) -> CheckpointManifest:
    """The manifest of the folder that ``latest`` or the path names."""
    found = FORMAT.find(path)
    [location] = [location for location in found if location.preferred] or found
    return FORMAT.read(location, ReadOptions())


def assert_holds(manifest: CheckpointManifest, expected: Mapping[str, Tensor]) -> None:
    """Names, shapes, dtypes and bits are the same."""
    assert set(manifest.tensors) == set(expected)
    for name, tensor in expected.items():
        source = manifest.tensors[name]
        assert source.shape == tuple(tensor.shape), name
        assert f"torch.{source.dtype.name}" == str(tensor.dtype), name
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert read_source(source).tobytes() == raw, name


def differing(manifest: CheckpointManifest) -> list[str]:
    """Names whose first source, cast, is not bit for bit the second."""
    wrong = []
    for check in manifest.equal:
        first, second = read_source(check.first), read_source(check.second)
        if first.astype(numpy_dtype(check.second.dtype)).tobytes() != second.tobytes():
            wrong.append(check.fqn)
    return wrong
