"""The tensor that a record of a torch file describes, as torch itself sees it."""

from __future__ import annotations

import os

import pytest

from ckptflow.torchfiles import LazyTensor

torch = pytest.importorskip("torch")

# What torch says of parts of its own that it uses when it saves.
quiet_torch = pytest.mark.filterwarnings(
    "ignore:TypedStorage is deprecated",
    "ignore:torch.quantize_per_tensor",
    "ignore:torch.distributed is disabled",
)


def values_of(tensor: LazyTensor) -> object:
    """The tensor as torch sees it, from nothing but the offsets that the reader gave."""
    storage = tensor.storage
    with open(storage.path, "rb") as file:
        data = bytearray(os.pread(file.fileno(), storage.nbytes, storage.offset))
    dtype = getattr(torch, tensor.dtype_name)
    if not data:
        return torch.empty(tensor.shape, dtype=dtype)
    whole = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(whole, tensor.storage_offset, tensor.shape, tensor.strides)


def assert_same(tensor: object, expected: object) -> None:
    """Bit for bit, shape and dtype included."""
    assert isinstance(tensor, LazyTensor)
    found = values_of(tensor)
    assert found.dtype == expected.dtype
    assert tuple(found.shape) == tuple(expected.shape)
    assert found.contiguous().flatten().view(torch.uint8).equal(expected.contiguous().flatten().view(torch.uint8))
