"""Plain numbers out of what a training loop calls its metrics, without a step that would wait for others."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping


def plain_numbers(metrics: Mapping[str, object] | None) -> dict[str, float]:
    """The metrics that are finite numbers at hand: reading one from a GPU would wait for all that is queued there."""
    numbers = {}
    for name, value in (metrics or {}).items():
        number = None if is_elsewhere(value) else number_of(value)
        if number is not None and math.isfinite(number):
            numbers[str(name)] = number
    return numbers


def number_of(value: object) -> float | None:
    """A number, or a tensor or array of one element, as a float; None for anything else.

    A DTensor is none: reading it is a collective operation, in which rank 0 alone would wait for ever.
    """
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        return None
    torch = sys.modules.get("torch")  # whoever passes a tensor has loaded it
    if torch is not None and isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return None
        value = value.detach()
    item = getattr(value, "item", None)
    try:
        return float(item() if callable(item) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # more than one element, a tensor on "meta"
        return None


def is_elsewhere(value: object) -> bool:
    """Whether it is in the memory of another device."""
    return getattr(getattr(value, "device", None), "type", "cpu") != "cpu"
