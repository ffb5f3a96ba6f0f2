"""Cut the data section of a weight file into blocks of equal size: the unit of work of the engine's threads."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from ckptflow.errors import UsageError
from ckptflow.output.safetensors import tensor_offsets
from ckptflow.plan import WeightFile


@dataclass(frozen=True, slots=True)
class Part:
    """The elements of one tensor that lie in one block.

    Attributes:
        number: which tensor of the weight file.
        start: first element in the block.
        stop: after the last element in the block.
        at: byte offset of the first element from the block's begin.
        nbytes: its bytes in the block.
    """

    number: int
    start: int
    stop: int
    at: int
    nbytes: int


class BlockPlan:
    """The blocks of one weight file.

    Attributes:
        count: number of blocks.
        data_bytes: bytes of the data section.
    """

    def __init__(self, file: WeightFile, block_bytes: int) -> None:
        self._offsets = tensor_offsets(file)
        self._itemsizes = [tensor.dtype.itemsize for tensor in file.tensors]
        self._block_bytes = block_bytes
        self.data_bytes = self._offsets[-1]
        self.count = -(-self.data_bytes // block_bytes)
        for tensor, offset in zip(file.tensors, self._offsets, strict=False):
            if offset % tensor.dtype.itemsize:
                raise UsageError(
                    "a tensor is not aligned in its weight file",
                    tensor=tensor.fqn,
                    expected=f"a multiple of {tensor.dtype.itemsize}: larger itemsize first",
                    found=f"offset {offset}",
                )

    def block_bytes(self, block: int) -> int:
        """Size of a block in bytes; only the last is shorter."""
        return min(self._block_bytes, self.data_bytes - block * self._block_bytes)

    def parts(self, block: int) -> list[Part]:
        """What the block is made of, in file order; tensors without elements are in no block."""
        begin = block * self._block_bytes
        end = begin + self.block_bytes(block)
        number = bisect_right(self._offsets, begin) - 1
        parts = []
        while number < len(self._itemsizes) and self._offsets[number] < end:
            first, last = self._offsets[number], self._offsets[number + 1]
            low, high, size = max(first, begin), min(last, end), self._itemsizes[number]
            if high > low:
                parts.append(Part(number, (low - first) // size, (high - first) // size, low - begin, high - low))
            number += 1
        return parts
