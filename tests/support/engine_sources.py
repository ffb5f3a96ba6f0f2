"""Real little files for the engine's tests: arrays stored in any element order, plans that read them, the output."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ckptflow.dtypes import DTYPES, DType, numpy_dtype
from ckptflow.engine import EngineOptions, write_weight_file
from ckptflow.engine.record import TensorRecord
from ckptflow.plan import LoraFold, PlannedTensor, WeightFile
from ckptflow.tensors import Piece, SourceFile, TensorSource, whole


class SourceWriter:
    """Appends arrays to one file and describes them as pieces; ``finish`` makes the file's own description true."""

    def __init__(self, path: Path, filler: int = 0xAB) -> None:
        self.path = path
        self._data = bytearray([filler] * 3)  # nothing is aligned by accident
        self._filler = filler

    def add(
        self, values: np.ndarray, order: Sequence[int] | None = None, gaps: Sequence[int] | None = None
    ) -> tuple[int, tuple[int, ...]]:
        """Store an array with its dims in ``order`` (outermost first) and ``gaps`` elements after each row of a dim.

        Returns:
            Byte offset, and strides in elements.
        """
        order = range(values.ndim) if order is None else order
        gaps = [0] * values.ndim if gaps is None else gaps
        strides, step = [0] * values.ndim, 1
        for dim in reversed(order):
            strides[dim] = step
            step = step * values.shape[dim] + gaps[dim]
        room = 1 + sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True))
        stored = np.frombuffer(bytes([self._filler]) * (room * values.itemsize), values.dtype).copy()
        for index in itertools.product(*map(range, values.shape)):
            stored[sum(i * s for i, s in zip(index, strides, strict=True))] = values[index]
        offset = len(self._data)
        self._data += stored.tobytes()
        return offset, tuple(strides)

    def append(self, data: bytes) -> int:
        """Store bytes as they are; gives their offset."""
        self._data += data
        return len(self._data) - len(data)

    def finish(self) -> SourceFile:
        """Write the file."""
        self.path.write_bytes(bytes(self._data))
        return describe(self.path)


def describe(path: Path) -> SourceFile:
    """The file as it is now."""
    status = path.stat()
    return SourceFile(str(path), status.st_size, status.st_mtime_ns)


def store(path: Path, values: np.ndarray, dtype: DType) -> TensorSource:
    """One row-major array in a file of its own."""
    path.write_bytes(b"xyz" + np.ascontiguousarray(values).tobytes())
    return whole(describe(path), 3, values.shape, dtype)


def piece(file: SourceFile, at: tuple[int, tuple[int, ...]], offsets: Sequence[int], sizes: Sequence[int]) -> Piece:
    """A piece from what ``SourceWriter.add`` gave."""
    return Piece(file, at[0], at[1], tuple(offsets), tuple(sizes))


def planned(fqn: str, source: TensorSource, dtype: str | None = None, **more: object) -> PlannedTensor:
    """An output tensor; without ``dtype`` the source's."""
    target = source.dtype if dtype is None else DTYPES[dtype]
    return PlannedTensor(fqn=fqn, source=source, dtype=target, source_fqns=(fqn,), **more)  # type: ignore[arg-type]


def weight_file(*tensors: PlannedTensor) -> WeightFile:
    """A weight file with the larger itemsize first, as ``arrange_files`` does."""
    return WeightFile(name="model.safetensors", tensors=tuple(sorted(tensors, key=lambda t: -t.dtype.itemsize)))


def store_all(directory: Path, arrays: Mapping[str, np.ndarray], dtype: str, target: str | None = None) -> WeightFile:
    """Each array in a file of its own, planned under its name."""
    tensors = [
        planned(fqn, store(directory / f"{n}.raw", values, DTYPES[dtype]), target)
        for n, (fqn, values) in enumerate(arrays.items())
    ]
    return weight_file(*tensors)


def read_output(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a weight file, through the safetensors library's own parser."""
    from safetensors import deserialize

    found = {}
    for fqn, entry in deserialize(path.read_bytes()):
        dtype = next(d for d in DTYPES.values() if d.code == entry["dtype"])
        found[fqn] = np.frombuffer(bytes(entry["data"]), numpy_dtype(dtype)).reshape(entry["shape"])
    return found


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal shape, dtype and bytes."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def random_fold(directory: Path, rows: int, columns: int, rank: int = 8, *, dora: bool, transposed: bool) -> LoraFold:
    """An adapter of random numbers for a base of ``rows`` by ``columns``."""
    rng = np.random.default_rng(2)
    inputs, outputs = (rows, columns) if transposed else (columns, rows)
    a = store(directory / "a", rng.standard_normal((rank, inputs), np.float32), DTYPES["float32"])
    b = store(directory / "b", rng.standard_normal((outputs, rank), np.float32), DTYPES["float32"])
    magnitude = store(directory / "m", rng.random(outputs, np.float32) + 1, DTYPES["float32"]) if dora else None
    return LoraFold(a=a, b=b, scale=0.37, magnitude=magnitude, transposed=transposed)


def base_of(directory: Path, rows: int, columns: int) -> tuple[np.ndarray, TensorSource]:
    """A base weight of random numbers."""
    values = np.random.default_rng(4).standard_normal((rows, columns), np.float32)
    return values, store(directory / "w", values, DTYPES["float32"])


Written = tuple[bytes, tuple[TensorRecord, ...]]


def write(file: WeightFile, path: Path, **options: object) -> Written:
    """Write a weight file: its bytes, and the records of its tensors."""
    record = write_weight_file(file, path, EngineOptions(durable=False, **options))  # type: ignore[arg-type]
    return path.read_bytes(), record.tensors
