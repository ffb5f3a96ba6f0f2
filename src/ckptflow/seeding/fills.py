"""What a range of a fresh tensor is filled with. Pure data, and its JSON, since a process of its own finds it out."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Normal:
    """Normal distribution."""

    mean: float
    std: float

    def __str__(self) -> str:
        return f"normal, mean {self.mean:g}, std {self.std:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedNormal:
    """Normal distribution, drawn again where a value is not within ``[low, high]``."""

    mean: float
    std: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"normal, mean {self.mean:g}, std {self.std:g}, within [{self.low:g}, {self.high:g}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """Uniform distribution on ``[low, high)``."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"uniform in [{self.low:g}, {self.high:g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One value."""

    value: float

    def __str__(self) -> str:
        return f"{self.value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """``start + index * step``, where the index counts elements of the whole tensor."""

    start: float
    step: float

    def __str__(self) -> str:
        return f"from {self.start:g} in steps of {self.step:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Values that the model computes for itself, such as decays of a state space layer.

    Attributes:
        dtype: numpy's name of it.
        data: little-endian, in base64.
    """

    dtype: str
    data: str

    @classmethod
    def of(cls, dtype: str, content: bytes) -> Values:
        """From plain bytes."""
        return cls(dtype=dtype, data=base64.b64encode(content).decode())

    @property
    def content(self) -> bytes:
        """Plain bytes."""
        return base64.b64decode(self.data)

    def __str__(self) -> str:
        return "computed by the model's own rule"


Kind = Normal | TruncatedNormal | Uniform | Constant | Sequence | Values
KINDS: Mapping[str, type[Kind]] = {
    kind.__name__: kind for kind in (Normal, TruncatedNormal, Uniform, Constant, Sequence, Values)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Elements ``[start, stop)`` of a tensor, counted row-major, and what they become."""

    start: int
    stop: int
    kind: Kind

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"start": self.start, "stop": self.stop, "kind": type(self.kind).__name__, **asdict(self.kind)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fill:
        """Of ``to_json``."""
        facts = {name: value for name, value in data.items() if name not in ("start", "stop", "kind")}
        return cls(start=data["start"], stop=data["stop"], kind=KINDS[data["kind"]](**facts))


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshTensor:
    """One tensor of a model without training.

    Attributes:
        fqn: name as ``save_pretrained`` writes it.
        shape: in elements.
        dtype: torch's name; ``float32`` for whatever takes the model's dtype.
        is_buffer: not trained.
        fills: in order; later ones overwrite earlier ones. Together they reach every element.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    is_buffer: bool
    fills: tuple[Fill, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        facts = {"fqn": self.fqn, "shape": list(self.shape), "dtype": self.dtype, "is_buffer": self.is_buffer}
        return {**facts, "fills": [fill.to_json() for fill in self.fills]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FreshTensor:
        """Of ``to_json``."""
        return cls(
            fqn=data["fqn"],
            shape=tuple(data["shape"]),
            dtype=data["dtype"],
            is_buffer=data["is_buffer"],
            fills=tuple(Fill.from_json(fill) for fill in data["fills"]),
        )
