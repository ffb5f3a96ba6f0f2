"""From the names that a model has in memory to those that transformers saves and other tools read.

Since transformers 4.52 vision-language models nest their parts differently in memory
(``model.language_model.layers…``) than in the files on the Hub (``model.layers…`` or ``language_model.model.layers…``),
since 5 some others differ, too; save_pretrained renames on the way out.
Trainers that save the state dict themselves leave the names in memory. transformers reads both, other tools don't.

Source: ``_checkpoint_conversion_mapping`` of transformers 4.57 and conversion_mapping.py of 5.x, read backwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptflow.plan import ConsolidationPlan

Prefixes = tuple[tuple[str, str], ...]

_QWEN2_VL: Prefixes = (("model.visual.", "visual."), ("model.language_model.", "model."), ("lm_head.", "lm_head."))
_LLAVA: Prefixes = (
    ("model.language_model.", "language_model.model."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.image_newline", "image_newline"),
    ("lm_head.", "language_model.lm_head."),
)
_LLAVA_FAMILY = (
    *("aria", "aya_vision", "gemma3", "got_ocr2", "internvl", "llava", "llava_next", "llava_next_video"),
    *("llava_onevision", "mistral3", "paligemma", "vipllava"),
)

# model_type → prefix in memory, prefix in files. Every name in memory starts with one of the former.
SAVED_PREFIXES: Mapping[str, Prefixes] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _QWEN2_VL),
    **dict.fromkeys(_LLAVA_FAMILY, _LLAVA),
    "gpt_neox": (("gpt_neox.", "gpt_neox."), ("lm_head.", "embed_out.")),
    "nemotron_h": (("model.", "backbone."), ("lm_head.", "lm_head.")),
    "mllama": (("model.vision_model.", "vision_model."), *_LLAVA),
    "video_llava": (("model.image_tower.", "image_tower."), ("model.video_tower.", "video_tower."), *_LLAVA),
}


def use_saved_names(plan: ConsolidationPlan, config: Mapping[str, object]) -> ConsolidationPlan:
    """Rename the tensors of a model whose names are those in memory; any other plan is left as it is."""
    prefixes = SAVED_PREFIXES.get(str(config.get("model_type")), ())
    names = [t.fqn for t in plan.tensors] + [*plan.ties, *plan.ties.values()]
    renamed = {name: _saved_name(name, prefixes) for name in names}
    if None in renamed.values() or all(name == saved for name, saved in renamed.items()):
        return plan
    new = {name: saved for name, saved in renamed.items() if saved is not None}
    return replace(
        plan,
        tensors=tuple(replace(t, fqn=new[t.fqn]) for t in plan.tensors),
        ties={new[alias]: new[owner] for alias, owner in plan.ties.items()},
        notes=(*plan.notes, "tensors have the names that transformers saves, not those that the model has in memory"),
    )


def _saved_name(name: str, prefixes: Prefixes) -> str | None:
    for live, saved in prefixes:
        if name.startswith(live):
            return saved + name.removeprefix(live)
    return None
