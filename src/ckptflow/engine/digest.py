"""Hashes and statistics of a weight file, fed with its blocks in order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import xxhash

from ckptflow.engine.blocks import Part
from ckptflow.engine.record import TensorRecord
from ckptflow.engine.scan import ValueRange
from ckptflow.output.safetensors import tensor_offsets
from ckptflow.plan import WeightFile


class FileDigest:
    """sha256 of the file, xxh3 and value range of each tensor."""

    def __init__(self, file: WeightFile, header: bytes) -> None:
        self._file = file
        self._header_bytes = len(header)
        self._sha256 = hashlib.sha256(header)
        self._xxh3 = xxhash.xxh3_128()
        self._current = 0
        self._range = ValueRange()
        self._done: list[tuple[str, ValueRange]] = []

    def add(self, block: memoryview, parts: Sequence[Part], ranges: Sequence[ValueRange]) -> None:
        """Take the next block, its parts, and the value range of each part."""
        self._sha256.update(block)
        for part, values in zip(parts, ranges, strict=True):
            self._finish_before(part.number)
            self._xxh3.update(block[part.at : part.at + part.nbytes])
            self._range = self._range.joined(values)

    def sha256(self) -> str:
        """Of all that was added, in hex."""
        return self._sha256.hexdigest()

    def tensors(self) -> tuple[TensorRecord, ...]:
        """The records of all tensors; call it after the last block."""
        self._finish_before(len(self._file.tensors))
        offsets = tensor_offsets(self._file)
        return tuple(
            TensorRecord(
                fqn=tensor.fqn,
                dtype=tensor.dtype,
                shape=tensor.shape,
                offset_bytes=self._header_bytes + offset,
                nbytes=tensor.nbytes,
                checksum=checksum,
                minimum=values.minimum,
                maximum=values.maximum,
                all_zero=values.all_zero,
                nonfinite=values.nonfinite,
            )
            for tensor, offset, (checksum, values) in zip(self._file.tensors, offsets, self._done, strict=False)
        )

    def _finish_before(self, number: int) -> None:
        while self._current < number:
            self._done.append((f"xxh3_128:{self._xxh3.hexdigest()}", self._range))
            self._xxh3.reset()
            self._range = ValueRange()
            self._current += 1
