"""Whether an adapter leaves a tied pair equal: PEFT trains one of two tied weights alone unless told otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptflow.errors import UnsupportedCheckpointError
from ckptflow.manifest import AdapterSpec
from ckptflow.plan import ConsolidationPlan
from ckptflow.transforms.lora_parts import sort_out
from ckptflow.transforms.ties import EMBEDDINGS, HEAD, TIES, declares_tied

# PEFT's tasks, and transformers' classes, whose models have an output head over the vocabulary.
TASKS_WITH_HEAD = ("CAUSAL_LM", "SEQ_2_SEQ_LM")
CLASS_WITH_HEAD = re.compile(r".*(LM|LMHeadModel|ForConditionalGeneration)")


def check_tied_modules(plan: ConsolidationPlan, spec: AdapterSpec, config: Mapping[str, object]) -> None:
    """Refuse an adapter of one of two weights that ``config`` makes one again when the folded model is loaded.

    The trained model computes with two weights then, the folded one with one. With ``ensure_weight_tying`` PEFT trains
    both as one. Two whole copies are left to the comparison of tied weights.

    Raises:
        UnsupportedCheckpointError: the adapter trains a tied embedding or head by itself.
    """
    if not declares_tied(config) or spec.config.get("ensure_weight_tying") is True or not _has_head(spec, config):
        return
    wrapped = sort_out(plan, spec)
    adapted = {f"{module}.weight" for module in wrapped.layers}
    there = {*wrapped.base, *wrapped.originals, *wrapped.saved}
    has_head = any(fqn.endswith(HEAD) for fqn in there - adapted)
    trained = [fqn for fqn in adapted if fqn.endswith((HEAD, *EMBEDDINGS))]
    trained += [fqn for fqn in wrapped.saved if fqn.endswith(EMBEDDINGS) and not has_head]
    if trained:
        raise UnsupportedCheckpointError(
            "the adapter trains one of two tied weights apart from the other",
            file=spec.config_path,
            tensor=min(trained),
            expected=f"{TIES} false in config.json, or ensure_weight_tying in adapter_config.json",
            found=f"{TIES} true: whoever loads the folded model makes them one",
            fix=f"where the checkpoint holds both, set {TIES} to false in its config.json; else save the base model "
            f"with both weights and {TIES} false, and name it with --base-model",
        )


def _has_head(spec: AdapterSpec, config: Mapping[str, object]) -> bool:
    task = spec.config.get("task_type")
    if task is not None:
        return task in TASKS_WITH_HEAD
    classes = config.get("architectures")
    return not isinstance(classes, list) or any(CLASS_WITH_HEAD.fullmatch(str(name)) for name in classes)
