"""Tensors as windows on bytes of a file: nothing is read until somebody asks for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, NoReturn

from ckptflow.errors import CorruptFileError
from ckptflow.torchfiles.dtypes import ITEMSIZE

MAX_TENSOR_BYTES: Final = 2**63 - 1
MAX_DIMS: Final = 64


class Sealed:
    """Base of everything that a pickle can lay hands on: its state can't be set from outside.

    Pickle's BUILD opcode calls ``__setstate__`` where there is one and sets attributes otherwise, even on frozen
    dataclasses with slots. With this base it fails, on instances (here) and on classes (an argument is missing).
    """

    __slots__ = ()

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError(f"the state of a {type(self).__name__} can't be set from a pickle")


@dataclass(frozen=True, slots=True, eq=False)
class LazyStorage(Sealed):
    """The bytes under one or more tensors. Compared by identity: one object per storage of one open file.

    Attributes:
        path: the file.
        key: torch's name of the storage inside the file.
        dtype_name: torch's name, such as ``float32``; None for an untyped storage.
        device: where it was when saved, such as ``cpu`` or ``cuda:3``.
        offset: where the bytes start in the file, in bytes.
        nbytes: how many there are.
        crc32: of the whole record; None where the file doesn't record it.
    """

    path: str
    key: str
    dtype_name: str | None
    device: str
    offset: int
    nbytes: int
    crc32: int | None

    def __setstate__(self, state: object) -> NoReturn:
        Sealed.__setstate__(self, state)

    def __reduce__(self) -> tuple[object, ...]:
        fields = (self.path, self.key, self.dtype_name, self.device, self.offset, self.nbytes, self.crc32)
        return (LazyStorage, fields)


@dataclass(frozen=True, slots=True)
class LazyTensor(Sealed):
    """A strided view on a storage. Equal means: same storage object, same window, same flags.

    Attributes:
        storage_offset: in elements.
        shape: in elements.
        strides: in elements.
        subclass: ``module.name`` of a tensor subclass that gives the bytes a meaning of its own, else None.

    Raises:
        CorruptFileError: when made with a window that doesn't lie inside its storage.
    """

    storage: LazyStorage
    dtype_name: str
    storage_offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
    conj: bool = False
    neg: bool = False
    is_parameter: bool = False
    subclass: str | None = None

    def __post_init__(self) -> None:
        itemsize = ITEMSIZE.get(self.dtype_name)
        if itemsize is None:
            raise self._refusal("a tensor has an unknown dtype", expected="a torch dtype", found=self.dtype_name)
        shape, strides, first = self.shape, self.strides, self.storage_offset
        if len(shape) != len(strides) or len(shape) > MAX_DIMS:
            raise self._refusal(
                "shape and strides of a tensor differ in length, or are too long", expected=shape, found=strides
            )
        numel = 1
        last = first
        for size, stride in zip(shape, strides, strict=True):
            if type(size) is not int or type(stride) is not int or size < 0 or stride < 0:
                raise self._refusal("shape or strides of a tensor aren't counts", found=(shape, strides))
            numel *= size
            last += (size - 1) * stride
        if type(first) is not int or first < 0:
            raise self._refusal("the storage offset of a tensor isn't a count", found=first)
        if numel * itemsize > MAX_TENSOR_BYTES:
            raise self._refusal("a tensor is larger than any machine", found=f"shape {shape}")
        if numel and (last + 1) * itemsize > self.storage.nbytes:
            raise self._refusal(
                "a tensor reaches beyond the end of its storage",
                expected=f"at most {self.storage.nbytes} bytes in storage {self.storage.key}",
                found=f"{(last + 1) * itemsize} bytes: offset {first}, shape {shape}, strides {strides}",
            )

    def _refusal(self, what: str, *, found: object, expected: object = None) -> CorruptFileError:
        # Rendered now: while a pickle is read, odd objects in it may fail to print.
        return CorruptFileError(what, file=self.storage.path, expected=expected, found=str(found)[:200])

    def __setstate__(self, state: object) -> NoReturn:
        Sealed.__setstate__(self, state)

    def __reduce__(self) -> tuple[object, ...]:
        return (LazyTensor, tuple(getattr(self, name) for name in self.__dataclass_fields__))

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype_name]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the values when packed, without gaps."""
        return self.numel * self.itemsize

    @property
    def byte_offset(self) -> int:
        """Where the first element is in the file, in bytes."""
        return self.storage.offset + self.storage_offset * self.itemsize

    @property
    def extent_bytes(self) -> int:
        """Bytes from the first element to the end of the last one in the storage, gaps included."""
        if 0 in self.shape:
            return 0
        span = 1
        for size, stride in zip(self.shape, self.strides, strict=True):
            span += (size - 1) * stride
        return span * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the values lie row-major without gaps (strides of axes of size 1 don't matter)."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0  # nothing to be in order
            expected *= size
        return True

    def as_parameter(self, *, requires_grad: bool) -> LazyTensor:
        """The same window as an ``nn.Parameter``."""
        return replace(self, requires_grad=requires_grad, is_parameter=True)

    def as_subclass(self, subclass: str) -> LazyTensor:
        """The same window as a tensor subclass, by ``module.name``."""
        return replace(self, subclass=subclass)


@dataclass(frozen=True, slots=True)
class MetaTensor(Sealed):
    """A tensor on the meta device: a shape without values."""

    dtype_name: str
    shape: tuple[int, ...]
    requires_grad: bool = False

    def __setstate__(self, state: object) -> NoReturn:
        Sealed.__setstate__(self, state)

    def __reduce__(self) -> tuple[object, ...]:
        return (MetaTensor, (self.dtype_name, self.shape, self.requires_grad))
