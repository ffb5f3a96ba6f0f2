"""Whether this machine has what transformers needs to load a quantized model; for the helper processes only."""

from __future__ import annotations

from typing import Any


def unusable_quantizer(config: Any) -> str | None:
    """Why transformers can't load the model here, for people: a package or a GPU is missing. None if nothing is.

    Args:
        config: transformers' config of the model; it is not changed.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    asked = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if not isinstance(asked, dict) or not AutoHfQuantizer.supports_quant_method(asked):  # type: ignore[no-untyped-call]
        return None
    try:
        quantizer = AutoHfQuantizer.from_config(dict(asked), pre_quantized=True)
        quantizer.validate_environment(device_map=None, weights_only=True)
    except (ImportError, RuntimeError) as error:
        return f"a model quantized by {asked.get('quant_method')} can't be loaded here: {error}"
    return None
