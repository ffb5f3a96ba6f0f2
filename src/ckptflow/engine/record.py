"""What was done: the record of each weight file and of each tensor in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from ckptflow.dtypes import DType, dtype_named
from ckptflow.engine.checksums import Compared


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One tensor as it was written.

    Attributes:
        fqn: its name.
        dtype: element type in the file.
        shape: in elements.
        offset_bytes: where its bytes begin, from the start of the file.
        nbytes: its bytes in the file.
        checksum: ``xxh3_128:`` and the hash of its bytes, in hex.
        minimum: smallest finite value as written; None where there is none (empty, complex, all NaN).
        maximum: largest finite value as written; None where there is none.
        all_zero: every element is zero (of either sign); False for an empty tensor.
        nonfinite: number of elements that are NaN or Inf.
    """

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int
    checksum: str
    minimum: float | int | None
    maximum: float | int | None
    all_zero: bool
    nonfinite: int

    def to_json(self) -> dict[str, object]:
        """Plain values for JSON; minimum and maximum are finite by construction."""
        return {name: getattr(self, name) for name in _PLAIN_FIELDS} | {
            "dtype": self.dtype.name,
            "shape": list(self.shape),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> TensorRecord:
        """The record that ``to_json`` made the data of."""
        values = cast("Mapping[str, Any]", data)
        plain = {name: values[name] for name in _PLAIN_FIELDS}
        return cls(dtype=dtype_named(values["dtype"]), shape=tuple(values["shape"]), **plain)


_PLAIN_FIELDS = ("fqn", "offset_bytes", "nbytes", "checksum", "minimum", "maximum", "all_zero", "nonfinite")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFileRecord:
    """One weight file as it was written.

    Attributes:
        name: file name.
        nbytes: size of the file, header included.
        sha256: of the whole file, in hex.
        tensors: in file order.
        seconds: wall time that writing it took.
        read_bytes: bytes read from the sources.
        written_bytes: bytes handed to the file system, padding of the last block included.
        compared: what became of the checksums that the sources record.
    """

    name: str
    nbytes: int
    sha256: str
    tensors: tuple[TensorRecord, ...]
    seconds: float
    read_bytes: int
    written_bytes: int
    compared: Compared = field(default_factory=Compared)

    def to_json(self) -> dict[str, object]:
        """Plain values for JSON."""
        plain = {name: getattr(self, name) for name in _FILE_FIELDS}
        return plain | {"tensors": [t.to_json() for t in self.tensors], "compared": self.compared.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> WeightFileRecord:
        """The record that ``to_json`` made the data of."""
        values = cast("Mapping[str, Any]", data)
        plain = {name: values[name] for name in _FILE_FIELDS}
        tensors = tuple(TensorRecord.from_json(t) for t in values["tensors"])
        return cls(tensors=tensors, compared=Compared.from_json(values["compared"]), **plain)


_FILE_FIELDS = ("name", "nbytes", "sha256", "seconds", "read_bytes", "written_bytes")
