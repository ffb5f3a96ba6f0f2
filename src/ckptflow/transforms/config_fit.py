"""Names of another code base: tensors that the model of config.json has no use for.

torchtitan, torchtune, OLMo-core, litgpt and others train models of their own, with names of their own, and some order
rows of q and k differently. Under such names transformers loads a model of random weights, with a warning only.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckptflow.errors import InconsistentCheckpointError, VerificationError
from ckptflow.plan import ConsolidationPlan

# Names of most language models in transformers. They need no question to it, which takes seconds; verify asks it.
FAMILIAR = re.compile(r"(?:^|\.)(?:embed_tokens\.weight|self_attn\.(?:q|k|v|o|qkv)_proj\.weight)$")


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
    raise InconsistentCheckpointError(
        "the names of the tensors are not those of the model that config.json describes",
        file=path,
        tensor=loading.unexpected[0],
        expected=f"{loading.missing[0]} and {len(loading.missing) - 1} others of {skeleton.architecture}",
        found=f"{len(loading.unexpected)} names that transformers does not know, of {len(tensors)}",
        fix="let the trainer export the model to Hugging Face's names (torchtitan: last_save_in_hf, or "
        "scripts/checkpoint_conversion): rows of q and k may lie in another order too. Names are kept where no "
        "config.json is",
    )
