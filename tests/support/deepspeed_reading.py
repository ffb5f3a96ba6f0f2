"""Reads DeepSpeed folders by both readers, and holds what was read against torch's tensors bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ckptflow.dtypes import numpy_dtype
from ckptflow.formats.base import ReadOptions
from ckptflow.formats.deepspeed import DeepSpeedCheckpoint
from ckptflow.manifest import CheckpointManifest
from ckptflow.validate.reread.base import Rereader, boxes
from ckptflow.validate.reread.deepspeed import reread_deepspeed
from reading import read_source

FORMAT = DeepSpeedCheckpoint()
# The checkpoints that DeepSpeed itself wrote.
FIXTURES = [
    "ds-autotp2-z1-bf16-w2",
    "ds-bf16opt-z1-w2",
    "ds-moe-z1-fp32-ep1-w2",
    "ds-pipe-z0-fp32-pp2",
    "ds-universal-z1-bf16-w2",
    "ds-universal-z3-bf16-w2-flat",
    "ds-z0-fp32-w2",
    "ds-z1-bf16-w2",
    "ds-z2-bf16-w2-frozen",
    "ds-z2-bf16-w2-tied",
    "ds-z2-fp32-w3-pad",
    "ds-z3-bf16-w2",
    "ds-z3-bf16-w3-frozen-pad",
    "ds0144-z2-bf16-w3-pad",
    "trainer-ds-z2-w2",
]


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


def open_states(folder: Path, config_dir: Path | None = None) -> Rereader:
    """The second reader of a tag folder."""
    return reread_deepspeed([*folder.glob("*states.pt"), *folder.glob("zero/*/fp32.pt")], config_dir)


def assert_reads(reader: Rereader, expected: Mapping[str, Tensor]) -> None:
    """Shapes, dtypes and values are the same, in small boxes and in boxes that are no whole rows."""
    for name, wanted in expected.items():
        assert reader.shape(name) == tuple(wanted.shape), name
        inner = tuple(min(1, n - 1) for n in wanted.shape), tuple(max(1, n - 2) for n in wanted.shape)
        for offsets, sizes in (*boxes(tuple(wanted.shape), 7), inner):
            found = reader.read(name, offsets, sizes)
            window = wanted[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
            assert found.dtype == wanted.dtype, name
            assert torch.equal(found, window), name
