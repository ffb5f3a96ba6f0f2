"""Weight files that lie in a store, read once from the first byte to the last, by ranges, in bounded memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from ckptflow.processes.pools import windowed
from ckptflow.tensors import Shape, contiguous_strides
from ckptflow.validate.headers import StoredTensor
from ckptflow.validate.scan import Scanned, TensorScan

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One weight file in a store.

    Attributes:
        name: file name.
        nbytes: its size.
        read: gives bytes by offset and count, from any thread; raises where it can't.
    """

    name: str
    nbytes: int
    read: Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """How a file is read: ranges of ``nbytes``, at most ``at_once`` of them requested or waiting in memory."""

    nbytes: int
    at_once: int
    pool: Executor

    def all_of(self, file: StoredFile) -> Iterator[bytes]:
        """The file's ranges in order."""
        offsets = range(0, file.nbytes, self.nbytes)
        return windowed(self.pool, lambda at: self.one(file, at // self.nbytes), offsets, self.at_once)

    def one(self, file: StoredFile, number: int) -> bytes:
        """Range ``number``, from 0."""
        offset = number * self.nbytes
        return file.read(offset, min(self.nbytes, file.nbytes - offset))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """What one pass over a weight file told: sha256, what each tensor holds, zero bytes at its end."""

    sha256: str
    scanned: Mapping[str, Scanned]
    zero_tail_bytes: int


class _Walk:
    """One file on the way from its first byte to its last; ranges that lie behind are read again where asked for."""

    def __init__(self, file: StoredFile, tensors: Mapping[str, StoredTensor], ranges: Ranges) -> None:
        self._file = file
        self._tensors = list(tensors.items())
        self._ranges = ranges
        self._coming = ranges.all_of(file)
        self._number, self._held = -1, b""
        self._sha256 = hashlib.sha256()
        self._zero_tail = 0
        self._at = 0
        self._scans = {fqn: TensorScan(tensor) for fqn, tensor in self._tensors}
        self._first = 0

    def read(self, offset: int, count: int) -> bytearray:
        """Bytes of the file."""
        out, done = bytearray(count), 0
        while done < count:
            number, skipped = divmod(offset + done, self._ranges.nbytes)
            piece = memoryview(self._range(number))[skipped : skipped + count - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
        return out

    def finish(self) -> FileFacts:
        """Read what was not read yet."""
        for content in self._coming:
            self._take(content)
        self._held = b""
        scanned = {fqn: scan.result() for fqn, scan in self._scans.items()}
        return FileFacts(sha256=self._sha256.hexdigest(), scanned=scanned, zero_tail_bytes=self._zero_tail)

    def _range(self, number: int) -> bytes:
        while self._number < number:
            self._take(next(self._coming))
        return self._held if number == self._number else self._ranges.one(self._file, number)

    def _take(self, content: bytes) -> None:
        self._number, self._held = self._number + 1, content
        self._sha256.update(content)
        kept = len(content.rstrip(b"\0"))
        self._zero_tail = len(content) - kept if kept else self._zero_tail + len(content)
        begin, end, view = self._at, self._at + len(content), memoryview(content)
        for fqn, tensor in self._tensors[self._first :]:
            if tensor.begin >= end:
                break
            low, high = max(tensor.begin, begin), min(tensor.begin + tensor.nbytes, end)
            if high > low:
                self._scans[fqn].add(view[low - begin : high - begin])
            if tensor.begin + tensor.nbytes <= end:
                self._first += 1
        self._at = end


class StoredReader:
    """The tensors of files in a store; whoever reads them in file order has each byte fetched once."""

    def __init__(self, files: Sequence[StoredFile], tensors: Mapping[str, StoredTensor], ranges: Ranges) -> None:
        self._files = {file.name: file for file in files}
        self._tensors = tensors
        self._ranges = ranges
        self._walk: _Walk | None = None
        self._name = ""
        self._facts: dict[str, FileFacts] = {}

    def read(self, fqn: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        """The box ``[offsets, offsets + sizes)`` of a tensor."""
        import torch

        stored = self._tensors[fqn]
        strides, itemsize = contiguous_strides(stored.shape), stored.dtype.itemsize
        first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        content = self._read(stored.file.name, stored.begin + first * itemsize, span * itemsize if prod(sizes) else 0)
        flat = torch.frombuffer(content, dtype=getattr(torch, stored.dtype.name)) if content else torch.empty(0)
        return flat.as_strided(sizes, strides)

    def facts(self) -> dict[str, FileFacts]:
        """By file name; reads what was not read yet."""
        for name in self._files:
            if name not in self._facts:
                self._turn_to(name)
                self._end_walk()
        return dict(self._facts)

    def _read(self, name: str, offset: int, count: int) -> bytearray:
        if name in self._facts:  # walked through before
            return bytearray(self._files[name].read(offset, count)) if count else bytearray()
        self._turn_to(name)
        assert self._walk is not None
        return self._walk.read(offset, count)

    def _turn_to(self, name: str) -> None:
        if self._name != name:
            self._end_walk()
            tensors = {fqn: tensor for fqn, tensor in self._tensors.items() if tensor.file.name == name}
            self._walk, self._name = _Walk(self._files[name], tensors, self._ranges), name

    def _end_walk(self) -> None:
        if self._walk is not None:
            self._facts[self._name] = self._walk.finish()
            self._walk, self._name = None, ""
