"""What a tensor is to PEFT, by its name: base weight, LoRA matrix, trained copy of a module.

PEFT keeps the adapter's name in the names of a live model (``q_proj.lora_A.default.weight``) and drops it in the files
that it saves (``q_proj.lora_A.weight``); see peft/utils/save_and_load.py and peft/tuners/lora/model.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ckptflow.errors import UnsupportedCheckpointError

Part = Literal["A", "B", "embedding_A", "embedding_B", "magnitude", "bias"]

_LORA = re.compile(
    r"^(?P<module>.+?)\.(?P<mark>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?P<rest>.+))?$"
)
_SAVED = re.compile(r"^(?P<module>.+?)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)$")
_ORIGINAL = re.compile(r"^(?P<module>.+?)\.original_module\.(?P<rest>.+)$")
_PARTS: dict[str, Part] = {
    "lora_A": "A",
    "lora_B": "B",
    "lora_embedding_A": "embedding_A",
    "lora_embedding_B": "embedding_B",
    "lora_magnitude_vector": "magnitude",
}
# Marks of PEFT methods and LoRA variants whose tensors can't be folded.
_FOREIGN = re.compile(
    r"(?:^|\.)(?:lora_\w+|token_adapter|ia3_l|hada_\w+|lokr_\w+|oft_\w+|boft_\w+|vera_\w+|vblora_\w+|fourierft_\w+"
    r"|hra_\w+|ln_tuning_layers|prompt_embeddings|prompt_encoder|adaption_prompt)(?:\.|$)"
)


@dataclass(frozen=True, slots=True)
class LoraPart:
    """A tensor of a LoRA layer.

    Attributes:
        module: name of the adapted module in the base model.
        part: which of the layer's tensors.
        adapter: the adapter's name; None in files that PEFT saved.
    """

    module: str
    part: Part
    adapter: str | None


@dataclass(frozen=True, slots=True)
class SavedModule:
    """A tensor of a module that was trained as a whole and takes the place of the base model's ``fqn``."""

    fqn: str
    adapter: str | None


@dataclass(frozen=True, slots=True)
class Original:
    """The untrained copy of a module that was trained as a whole."""

    fqn: str


@dataclass(frozen=True, slots=True)
class Base:
    """A tensor of the base model."""

    fqn: str


Role = LoraPart | SavedModule | Original | Base


def role_of(name: str, prefix: str, separate: bool) -> Role:
    """What ``name`` is to PEFT. ``prefix`` and ``separate`` as in ``AdapterSpec``.

    Raises:
        UnsupportedCheckpointError: a tensor of another method than LoRA, or of a LoRA variant that can't be folded.
    """
    if separate and not name.startswith(prefix):
        return Base(name)
    short = name.removeprefix(prefix)
    lora = _LORA.match(short)
    if lora is not None:
        return _lora_part(name, lora)
    saved = _SAVED.match(short)
    if saved is not None:
        return SavedModule(f"{saved['module']}.{saved['rest']}", saved["adapter"])
    original = _ORIGINAL.match(short)
    if original is not None:
        return Original(f"{original['module']}.{original['rest']}")
    if _FOREIGN.search(short):
        raise UnsupportedCheckpointError(
            "a tensor of a PEFT method that ckptflow can't fold",
            tensor=name,
            expected="LoRA, rsLoRA or DoRA",
            fix="merge it with PEFT (merge_and_unload) and save the result",
        )
    fqn = short.replace(".base_layer.", ".")
    return SavedModule(fqn, None) if separate else Base(fqn)


def _lora_part(name: str, match: re.Match[str]) -> LoraPart:
    rest = (match["rest"] or "").split(".") if match["rest"] else []
    last = rest.pop() if rest and rest[-1] in ("weight", "bias") else "weight"
    part = _PARTS[match["mark"]]
    if last == "bias":
        if part != "B":
            raise UnsupportedCheckpointError("a LoRA tensor that PEFT doesn't write", tensor=name)
        part = "bias"
    # A LoRA layer around a layer that is adapted itself, as PEFT nests them for parameters of fused experts.
    if ".base_layer" in match["module"] or match["module"].endswith("base_layer"):
        raise UnsupportedCheckpointError(
            "nested LoRA layers (target_parameters)",
            tensor=name,
            fix="merge it with PEFT (merge_and_unload) and save the result",
        )
    return LoraPart(match["module"], part, ".".join(rest) or None)
