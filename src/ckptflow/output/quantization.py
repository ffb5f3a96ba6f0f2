"""config.json's ``quantization_config`` in step with the weights.

Who trains a quantized model dequantizes it first, and its config may still tell the old storage: transformers would
then take the trained weights for packed numbers, or look for scales that are not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptflow.output.sidefiles import QUANTIZATION_KEY as KEY
from ckptflow.plan import ConsolidationPlan
from ckptflow.transforms.quantized import QUANTIZED_METHODS, quantized_modules


def with_quantization_of(plan: ConsolidationPlan, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The config, and notes for people; what the plan contradicts is left out.

    Args:
        plan: the output's tensors.
        config: content of config.json; empty where there is none.
    """
    methods = _methods(config)
    quantized = quantized_modules(plan.tensors)
    if quantized and config and not methods:
        return dict(config), [
            f"{len(quantized)} modules are quantized, and config.json has no {KEY}: transformers can't load them"
        ]
    if quantized or not methods:
        return dict(config), []
    named = " and ".join(sorted(methods))
    if methods <= QUANTIZED_METHODS:
        return _without(config), [f"config.json's {KEY} ({named}) is left out: no tensor here is quantized"]
    return dict(config), [f"config.json has a {KEY} ({named}), and no tensor here is quantized; it is carried over"]


def _methods(config: Mapping[str, Any]) -> set[str]:
    """Of the config and of those nested in it, as vision-language models have them."""
    found = set()
    for name, value in config.items():
        if name == KEY and isinstance(value, Mapping):
            found.add(str(value.get("quant_method")))
        elif isinstance(value, Mapping):
            found |= _methods(value)
    return found


def _without(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without(value) if isinstance(value, Mapping) else value for name, value in config.items() if name != KEY
    }
