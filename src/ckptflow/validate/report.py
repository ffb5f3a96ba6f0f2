"""What verification found: one ``Check`` per question, with the figures that answer it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptflow.errors import VerificationError

Status = Literal["passed", "failed", "skipped", "warning"]
Figure = str | int | float

SHOWN = 8
"""Names that a message lists before it says how many more there are."""

KEYS = "keys and shapes"
"""The check of names and shapes against config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question and its answer.

    Attributes:
        name: the question, in a few words.
        status: ``skipped`` says that it could not be answered, and ``detail`` why; a ``warning`` does not fail.
        detail: the answer in words, for people.
        figures: what was counted or measured; names end in their unit where they have one.
    """

    name: str
    status: Status
    detail: str
    figures: Mapping[str, Figure] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingHistogram:
    """How far the cast moved the values, relative to each value.

    Attributes:
        edges: bin edges of ``|cast - value| / |value|``; one more than ``counts``.
        counts: elements in each bin; the last bin takes all above it, such as values that became subnormal or zero.
        exact: elements that the cast did not change at all; they are in no bin.
        sampled: elements looked at; evenly spread where a tensor is large.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    exact: int
    sampled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    """All checks of one output directory.

    Attributes:
        checks: in the order in which they were made.
        tensors_compared: tensors compared with the source, element by element.
        elements_compared: elements of these tensors.
        differing_elements: elements whose bits are not what torch's cast of the source gives.
        rounding_histogram: None where nothing was compared, or nothing was cast.
        bytes_by_dtype: bytes of tensor data in the output by dtype name.
        seconds: wall time.
    """

    checks: tuple[Check, ...]
    tensors_compared: int = 0
    elements_compared: int = 0
    differing_elements: int = 0
    rounding_histogram: RoundingHistogram | None = None
    bytes_by_dtype: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status == "failed")

    @property
    def passed(self) -> bool:
        """No check failed."""
        return not self.failures

    def raise_if_failed(self) -> None:
        """Turn failed checks into an error.

        Raises:
            VerificationError: a check failed; the message lists each one.
        """
        if self.failures:
            listed = "".join(f"\n    {check.name}: {check.detail}" for check in self.failures)
            # Converting again mends damage; other shapes than the config's, as after a resized embedding, it doesn't.
            config = ", with the config.json of this very model" if KEYS in {c.name for c in self.failures} else ""
            raise VerificationError(
                f"{len(self.failures)} of {len(self.checks)} checks failed",
                found=listed,
                fix=f"don't publish this directory; convert the checkpoint again{config}",
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        histogram = self.rounding_histogram
        return {
            "passed": self.passed,
            "checks": [
                {"name": c.name, "status": c.status, "detail": c.detail, "figures": dict(c.figures)}
                for c in self.checks
            ],
            "tensors_compared": self.tensors_compared,
            "elements_compared": self.elements_compared,
            "differing_elements": self.differing_elements,
            "rounding_histogram": None
            if histogram is None
            else {
                "edges": list(histogram.edges),
                "counts": list(histogram.counts),
                "exact": histogram.exact,
                "sampled": histogram.sampled,
            },
            "bytes_by_dtype": dict(self.bytes_by_dtype),
            "seconds": round(self.seconds, 3),
        }


def listing(names: Iterable[str], shown: int = SHOWN) -> str:
    """The first names, and how many more there are."""
    ordered = list(names)
    more = f" and {len(ordered) - shown} more" if len(ordered) > shown else ""
    return ", ".join(ordered[:shown]) + more
