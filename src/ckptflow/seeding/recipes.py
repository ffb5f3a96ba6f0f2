"""Standard deviations of fresh weights, by name."""

from __future__ import annotations

import math

from ckptflow.errors import UsageError

DEFAULT = "default"


def small_init(hidden_size: int) -> float:
    """``sqrt(2 / (5 * hidden_size))``, about 0.01 at a hidden size of 4096.

    Nguyen & Salazar, "Transformers without Tears: Improving the Normalization of Self-Attention", IWSLT 2019,
    https://arxiv.org/abs/1910.05895: Xavier's formula for the widest matrix of a layer, from ``d`` to ``4 d``, taken
    for all of them: ``sqrt(2 / (d + 4 d))``.
    """
    return math.sqrt(2 / (5 * hidden_size))


def mt_nlg_530b(hidden_size: int) -> float:
    """``sqrt(1 / (3 * hidden_size))``, 0.004 at the hidden size of 20480 of that model.

    Smith et al., "Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B, A Large-Scale Generative Language
    Model", 2022, https://arxiv.org/abs/2201.11990.
    """
    return math.sqrt(1 / (3 * hidden_size))


FORMULAS = {"small-init": small_init, "mt-nlg-530b": mt_nlg_530b}


def parse_init_std(text: str) -> str | float:
    """A name of a recipe, or a number above 0.

    Raises:
        UsageError: it is neither.
    """
    if text == DEFAULT or text in FORMULAS:
        return text
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise UsageError(
            "not an initial standard deviation",
            expected=f"{DEFAULT}, {', '.join(FORMULAS)}, or a number above 0",
            found=text,
        )
    return number


def std_of(init_std: str | float, hidden_size: int) -> float | None:
    """The standard deviation that a recipe means at a hidden size; None: the model's own, whatever they are."""
    if isinstance(init_std, float):
        return init_std
    return None if init_std == DEFAULT else FORMULAS[init_std](hidden_size)
