"""Whether the tensors can be the model of config.json: names of another code base, and layers that are not here.

torchtitan, torchtune, OLMo-core, litgpt and others train models of their own, with names of their own, and some order
rows of q and k differently. Under such names transformers loads a model of random weights, with a warning only. Those
that ``code_bases`` has tables for are renamed before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ckptflow.errors import IncompleteCheckpointError, InconsistentCheckpointError, VerificationError
from ckptflow.plan import ConsolidationPlan
from ckptflow.transforms.code_bases.registry import recognise, tables_of

# Names of most language models in transformers. They need no question to it, which takes seconds; verify asks it.
FAMILIAR = re.compile(r"(?:^|\.)(?:embed_tokens\.weight|self_attn\.(?:q|k|v|o|qkv)_proj\.weight)$")
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def check_layers(plan: ConsolidationPlan, config: Mapping[str, object], config_dir: Path, path: Path) -> None:
    """Hold the numbers of layers to config.json: one of a model's several files looks like a model.

    More layers than the config describes are multi-token prediction; encoders and decoders count apart. Where fewer
    are here, transformers is asked, since some models count otherwise: a layer of LongCat's is two in its config.

    Args:
        plan: what will be written.
        config: the content of config.json.
        config_dir: directory with config.json.
        path: the checkpoint, for messages.

    Raises:
        IncompleteCheckpointError: a layer is missing.
    """
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config
    described = config.get("num_hidden_layers", text.get("num_hidden_layers"))
    found = {int(match[1]) for fqn in (*(t.fqn for t in plan.tensors), *plan.ties) if (match := LAYER.search(fqn))}
    if not found or type(described) is not int or config.get("is_encoder_decoder") is True:
        return
    absent = next((number for number in range(described) if number not in found), None)
    if absent is not None and _has_layer(config_dir, absent):
        raise IncompleteCheckpointError(
            "a layer that config.json describes is not in the checkpoint",
            file=path,
            expected=f"layers 0 to {described - 1}",
            found=f"{len(found)} layers, and no layers.{absent}",
            fix="name the directory with all files of the model, or the right config.json with --config",
        )


def _has_layer(config_dir: Path, number: int) -> bool:
    """Whether the model of a config has a layer of that number; True where transformers can't tell."""
    from ckptflow.validate.skeleton import describe_model

    try:
        names = describe_model(config_dir).shapes
    except VerificationError:
        names = {}
    return not names or any((match := LAYER.search(fqn)) and int(match[1]) == number for fqn in names)


def check_fits_config(plan: ConsolidationPlan, config_dir: Path, path: Path) -> None:
    """Ask transformers whether it finds the model of ``config_dir`` among the tensors, if their names are unusual.

    A model that lacks some tensors, or has some more, is left to ``verify``.

    Args:
        plan: what will be written.
        config_dir: directory with config.json.
        path: the checkpoint, for messages.

    Raises:
        InconsistentCheckpointError: most of the tensors are not the model's, and most of the model's are not here.
    """
    from ckptflow.validate.skeleton import describe_model

    tensors = {t.fqn: (t.dtype.name, t.shape) for t in plan.tensors}
    if any(FAMILIAR.search(fqn) for fqn in (*tensors, *plan.ties)):
        return
    try:
        skeleton = describe_model(config_dir, tensors)
    except VerificationError:
        return  # verify asks again, and says so
    loading, needed = skeleton.loading, set(skeleton.live_names) - set(skeleton.tied)
    if loading is None or 2 * len(loading.missing) <= len(needed) or 2 * len(loading.unexpected) <= len(tensors):
        return
    known = recognise(tensors)
    whose = "" if known is None else f"; they are those of {known[0].name}, with tables for {tables_of(known[0])}"
    raise InconsistentCheckpointError(
        "the names of the tensors are not those of the model that config.json describes",
        file=path,
        tensor=loading.unexpected[0],
        expected=f"{loading.missing[0]} and {len(loading.missing) - 1} others of {skeleton.architecture}",
        found=f"{len(loading.unexpected)} names that transformers does not know, of {len(tensors)}{whose}",
        fix="let the trainer export the model to Hugging Face's names (torchtitan: last_save_in_hf, or "
        "scripts/checkpoint_conversion): rows of q and k may lie in another order too. Names are kept where no "
        "config.json is",
    )
