"""PEFT's adapter_config.json, or what the adapter's tensors tell where there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from ckptflow.errors import IncompleteCheckpointError, InconsistentCheckpointError
from ckptflow.files.jsonfiles import read_json_object
from ckptflow.formats.files import checked_file
from ckptflow.manifest import AdapterSpec
from ckptflow.tensors import TensorSource
from ckptflow.transforms.fqn import PEFT_PREFIX, is_peft_name
from ckptflow.transforms.lora_names import LoraPart, SavedModule, role_of

CONFIG_NAME = "adapter_config.json"
# What verl leaves of it beside its rank files.
SHORT_NAME = "lora_train_meta.json"
MAX_CONFIG_BYTES = 16 * 1024 * 1024


def read_adapter_config(path: Path, root: Path) -> dict[str, object]:
    """The config's fields.

    Raises:
        IncompleteCheckpointError: missing or empty.
        CorruptFileError: not a JSON object.
    """
    return read_json_object(Path(checked_file(path, root).path), MAX_CONFIG_BYTES)


def adapter_spec(
    tensors: Mapping[str, TensorSource], config_path: Path, root: Path, short_path: Path | None = None
) -> tuple[AdapterSpec | None, list[str]]:
    """The adapter of a model that PEFT wrapped, and notes; None where no name speaks of PEFT.

    Args:
        tensors: all tensors of the wrapped model.
        config_path: where the adapter's config would be.
        root: directory that the config may not lead out of.
        short_path: where a file may be that tells rank and alpha alone, if there is no config.

    Raises:
        CheckpointError: one of the two can't be read, or tells another rank than the tensors have.
    """
    if not any(is_peft_name(name) for name in tensors):
        return None, []
    prefix = PEFT_PREFIX if any(name.startswith(PEFT_PREFIX) for name in tensors) else ""
    try:
        config = read_adapter_config(config_path, root)
    except IncompleteCheckpointError:
        if short_path is not None and short_path.is_file():
            config = _completed(inferred_config(tensors, prefix), short_path, root)
            return AdapterSpec(config=config, prefix=prefix, config_path=short_path), []
        notes = [f"{config_path.name} is not there: the adapter's rank is read from its tensors, its alpha is unknown"]
        return AdapterSpec(config=inferred_config(tensors, prefix), prefix=prefix, config_path=None), notes
    return AdapterSpec(config=config, prefix=prefix, config_path=config_path), []


def _completed(config: dict[str, object], path: Path, root: Path) -> dict[str, object]:
    told = read_adapter_config(path, root)
    if "r" in config and told.get("r") not in (None, config["r"]):
        raise InconsistentCheckpointError(
            "the adapter's tensors have another rank than was recorded",
            file=path,
            expected=f"r = {told['r']}",
            found=f"r = {config['r']}",
            fix="the file may be of another save: move it away, and say --lora-alpha",
        )
    return {**config, **{key: told[key] for key in ("r", "lora_alpha") if told.get(key) is not None}}


def inferred_config(tensors: Mapping[str, TensorSource], prefix: str) -> dict[str, object]:
    """What tensors tell of an adapter's config: everything but alpha and rsLoRA."""
    ranks: dict[str, int] = {}
    saved: set[str] = set()
    dora = False
    for name, source in tensors.items():
        role = role_of(name, prefix, separate=False)
        if isinstance(role, LoraPart):
            dora |= role.part == "magnitude"
            if role.part in ("A", "embedding_A") and source.shape:
                ranks[role.module] = source.shape[0]
        elif isinstance(role, SavedModule):
            saved.add(role.fqn.split(".")[-2] if "." in role.fqn else role.fqn)
    common = Counter(ranks.values()).most_common(1)
    config: dict[str, object] = {
        "peft_type": "LORA",
        "target_modules": sorted({module.rpartition(".")[2] for module in ranks}),
        "rank_pattern": {module: rank for module, rank in ranks.items() if rank != common[0][0]},
        "use_dora": dora,
    }
    if common:
        config["r"] = common[0][0]
    if saved:
        config["modules_to_save"] = sorted(saved)
    return config
