"""What PEFT's adapter_config.json says about ranks and scales, by PEFT's own rules."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from ckptflow.errors import CheckpointError, CorruptFileError, UnsafeFileError, UnsupportedCheckpointError, UsageError

# Options of LoraConfig under which B @ A is not the update, or the tensors are not those of plain layers.
UNSUPPORTED_OPTIONS = (
    "target_parameters",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "use_bdlora",
    "use_qalora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
    "megatron_config",
)
# Initialisations that change the base weights: the adapter belongs to what training left of them.
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "lora_ga", "loftq")
MAX_PATTERN_CHARS = 512
MAX_QUANTIFIERS = 3


def check_supported(config: Mapping[str, object], config_path: object = None) -> None:
    """Refuse kinds of adapters that can't be folded, by name.

    Raises:
        UnsupportedCheckpointError: another PEFT method than LoRA, or an option of LoRA that ckptflow doesn't know.
    """
    kind = config.get("peft_type", "LORA")
    file = None if config_path is None else str(config_path)
    if kind != "LORA":
        raise UnsupportedCheckpointError(
            "a PEFT method that ckptflow can't fold",
            file=file,
            expected="peft_type LORA",
            found=kind,
            fix="merge it with PEFT (merge_and_unload), if the method can be merged, and save the result",
        )
    for option in UNSUPPORTED_OPTIONS:
        if config.get(option):
            raise UnsupportedCheckpointError(
                f"LoRA with {option} can't be folded by ckptflow",
                file=file,
                found=f"{option}: {config[option]!r}"[:200],
                fix="merge it with PEFT (merge_and_unload) and save the result",
            )


def check_base_unchanged(config: Mapping[str, object], config_path: object = None) -> None:
    """Refuse an adapter whose initialisation changed the base weights, which are then not those on disk.

    Raises:
        UnsupportedCheckpointError: PiSSA, OLoRA, CorDA, LoRA-GA or LoftQ, not converted to a plain LoRA.
    """
    init = str(config.get("init_lora_weights", "")).lower()
    if init.startswith(BASE_CHANGING_INITS):
        raise UnsupportedCheckpointError(
            "the adapter's initialisation changed the base weights; added to the original ones it gives another model",
            file=None if config_path is None else str(config_path),
            found=f"init_lora_weights: {init}",
            fix="convert the adapter with PEFT's save_pretrained(path_initial_model_for_weight_conversion=…)",
        )


def known_alpha(config: Mapping[str, object], given: float | None) -> float:
    """LoRA's alpha from the config or from the person.

    Raises:
        CheckpointError: nobody knows it.
        UsageError: both do, and they differ.
    """
    written = _number(config, "lora_alpha")
    if not written:  # 0 switches an adapter off; verl's merger writes it where it doesn't know
        if given is None:
            raise CheckpointError(
                "the checkpoint holds LoRA and does not tell its alpha, which scales it",
                expected="lora_alpha in adapter_config.json",
                found="nothing" if written is None else f"lora_alpha {written:g}",
                fix="refused until given: --lora-alpha X, as the trainer was configured",
            )
        return given
    if given is not None and given != written:
        raise UsageError(
            "--lora-alpha contradicts the adapter's own config", expected=f"{written:g}", found=f"{given:g}"
        )
    return written


def scale_of(config: Mapping[str, object], module: str, rank: int, alpha: float) -> float:
    """What B @ A is multiplied with: alpha / r, or alpha / sqrt(r) for rsLoRA (peft/tuners/lora/layer.py)."""
    value = _of_pattern(config, "alpha_pattern", module)
    used = alpha if value is None else value
    return used / math.sqrt(rank) if config.get("use_rslora") is True else used / rank


def expected_rank(config: Mapping[str, object], module: str) -> int | None:
    """The rank that the config gives a module; None where it doesn't say."""
    value = _of_pattern(config, "rank_pattern", module)
    rank = _number(config, "r") if value is None else value
    return None if rank is None else int(rank)


def _number(config: Mapping[str, object], key: str) -> float | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise CorruptFileError(f"{key} in adapter_config.json is not a number", found=repr(value))
    return float(value)


def _of_pattern(config: Mapping[str, object], option: str, module: str) -> float | None:
    """The value of the first pattern that matches the end of a module's name (``get_pattern_key`` in PEFT)."""
    patterns = config.get(option)
    if not patterns:
        return None
    if not isinstance(patterns, Mapping):
        raise CorruptFileError(f"{option} in adapter_config.json is not a map", found=repr(patterns)[:200])
    for pattern in patterns:
        if _compiled(str(pattern), option).match(module):
            return _number(patterns, pattern)
    return None


def _compiled(pattern: str, option: str) -> re.Pattern[str]:
    # Patterns come from the checkpoint. Nested repetition can take for ever on a name that does not match.
    quantifiers = sum(pattern.count(c) for c in "*+{")
    if len(pattern) > MAX_PATTERN_CHARS or quantifiers > MAX_QUANTIFIERS or re.search(r"\)[*+{]", pattern):
        raise UnsafeFileError(f"a pattern in {option} is too complex to match safely", found=pattern[:200])
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except re.error as error:
        raise CorruptFileError(f"a pattern in {option} is no regular expression", found=pattern[:200]) from error
