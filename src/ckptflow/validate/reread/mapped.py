"""Tensors of torch files that lie inside larger files: found by torch's own reader, mapped, and read box by box.

torch maps files of its own alone. Under ``FakeTensorMode`` ``torch.load`` reads no storage and notes where each begins.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ckptflow.tensors import Shape
from ckptflow.validate.reread.base import window_of
from ckptflow.validate.reread.torch_stubs import load_plain, trained_values

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor in a mapped file, where it may lie at any byte.

    Attributes:
        values: its elements as bytes without a meaning, in its shape.
        dtype: what they mean.
    """

    values: NDArray[np.void]
    dtype: torch.dtype

    @property
    def shape(self) -> Shape:
        """In elements."""
        return self.values.shape

    def read(self, offsets: Shape, sizes: Shape) -> torch.Tensor:
        """The box ``[offsets, offsets + sizes)``."""
        import numpy as np
        import torch

        box = self.values[window_of(offsets, sizes)].copy()
        return torch.from_numpy(box.reshape(-1).view(np.uint8)).view(self.dtype).reshape(sizes)


class MappedFiles:
    """Files that are mapped once."""

    def __init__(self) -> None:
        self._mapped: dict[Path, NDArray[np.uint8]] = {}

    def tensor(self, path: Path, offset: int, nbytes: int) -> MappedTensor:
        """The tensor of the torch file in ``nbytes`` bytes of ``path`` from ``offset`` on.

        Raises:
            pickle.UnpicklingError, RuntimeError: torch refuses the file, or it holds no tensor.
        """
        import numpy as np
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        with open(path, "rb") as file, FakeTensorMode():
            value = load_plain(BufferedReader(_Part(file, offset, nbytes)))
            if not isinstance(value, torch.Tensor):
                raise RuntimeError(f"an entry of {path.name} holds a {type(value).__name__}, not a tensor")
            fake = trained_values(value)
            begin, itemsize = fake.untyped_storage()._checkpoint_offset, fake.dtype.itemsize
            shape, strides, first = tuple(fake.shape), fake.stride(), fake.storage_offset()
        if begin is None:
            raise RuntimeError(f"torch {torch.__version__} does not tell where storages begin")
        if path not in self._mapped:
            self._mapped[path] = np.memmap(path, np.uint8, "r")
        values: NDArray[np.void] = np.ndarray(
            shape,
            np.dtype(f"V{itemsize}"),
            self._mapped[path],
            offset + begin + first * itemsize,
            tuple(stride * itemsize for stride in strides),
        )
        return MappedTensor(values, fake.dtype)


class _Part(RawIOBase):
    """A part of an open file, as a file of its own."""

    def __init__(self, file: BinaryIO, offset: int, nbytes: int) -> None:
        self._file, self._offset, self._nbytes, self._at = file, offset, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")[: max(0, self._nbytes - self._at)]
        count = os.preadv(self._file.fileno(), [target], self._offset + self._at)
        self._at += count
        return count
