"""What becomes of a distribution when its values are scaled or shifted, and what several fills reach together."""

from __future__ import annotations

from dataclasses import replace

from ckptflow.seeding.fills import Constant, Fill, Kind, Normal, TruncatedNormal, Uniform


def changed_by(kind: Kind, name: str, value: float) -> Kind | None:
    """The kind of ``x name value`` for elements ``x`` of a kind."""
    if name in ("add", "sub"):
        return _shifted(kind, value if name == "add" else -value)
    factor = value if name == "mul" else 1 / value
    if isinstance(kind, Constant):
        return Constant(value=kind.value * factor)
    if factor <= 0:
        return None
    if isinstance(kind, Normal):
        return Normal(mean=kind.mean * factor, std=kind.std * factor)
    if isinstance(kind, Uniform):
        return Uniform(low=kind.low * factor, high=kind.high * factor)
    if isinstance(kind, TruncatedNormal):
        bounds = {"low": kind.low * factor, "high": kind.high * factor}
        return TruncatedNormal(mean=kind.mean * factor, std=kind.std * factor, **bounds)
    return None


def _shifted(kind: Kind, value: float) -> Kind | None:
    if isinstance(kind, Constant):
        return Constant(value=kind.value + value)
    if isinstance(kind, Normal):
        return replace(kind, mean=kind.mean + value)
    if isinstance(kind, Uniform):
        return Uniform(low=kind.low + value, high=kind.high + value)
    if isinstance(kind, TruncatedNormal):
        return replace(kind, mean=kind.mean + value, low=kind.low + value, high=kind.high + value)
    return None


def covers(fills: list[Fill], numel: int) -> bool:
    """Whether the fills reach every element."""
    reached = 0
    for fill in sorted(fills, key=lambda f: f.start):
        if fill.start > reached:
            return False
        reached = max(reached, fill.stop)
    return reached >= numel
