"""The names of DeepSpeed's files, and which tag of a folder is meant.

Names: ``_get_ckpt_name``, ``_get_zero_ckpt_name`` and ``_get_expert_ckpt_name`` of deepspeed/runtime/engine.py, and
``ckpt_layer_path`` of deepspeed/runtime/pipe/module.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckptflow.errors import IncompleteCheckpointError, InconsistentCheckpointError
from ckptflow.formats.files import list_names

# bf16_ is there in bf16 runs of any stage. Versions before 0.3.1 have no underscore before "optim".
_OPTIM = re.compile(r"^(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt$")
_MODEL = re.compile(r"^mp_rank_(\d+)_model_states\.pt$")
_SHARDED_MODEL = re.compile(r"^zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt$")
_LAYER = re.compile(r"^layer_(\d+)(?:-model_(\d+))?-model_states\.pt$")
_EXPERT = re.compile(r"^layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt$")
_EXPERT_OPTIM = re.compile(r"^expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
STATE_FILES = (_OPTIM, _MODEL, _SHARDED_MODEL, _LAYER, _EXPERT, _EXPERT_OPTIM)
_MAX_TAG_BYTES = 4096

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
UNIVERSAL_FOLDER = "zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class TagFiles:
    """The files of one tag folder, by what their names say.

    Attributes:
        folder: the tag folder.
        optim: (dp rank, mp rank) → optimizer file.
        models: mp rank → model file that all dp ranks share (stages 0 to 2).
        sharded_models: (dp rank, mp rank) → model file of one rank (stage 3).
        layers: (layer, tp rank) → weights of one pipeline layer.
        experts: (MoE layer, expert, mp rank) → weights of one expert.
        expert_optims: optimizer files of experts, without ZeRO.
        others: names that mean nothing to us.
    """

    folder: Path
    optim: Mapping[tuple[int, int], str] = field(default_factory=dict)
    models: Mapping[int, str] = field(default_factory=dict)
    sharded_models: Mapping[tuple[int, int], str] = field(default_factory=dict)
    layers: Mapping[tuple[int, int], str] = field(default_factory=dict)
    experts: Mapping[tuple[int, int, int], str] = field(default_factory=dict)
    expert_optims: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def mp_ranks(self) -> list[int]:
        """Model-parallel ranks that have a model file."""
        return sorted({*self.models, *(mp for _, mp in self.sharded_models)})


def is_state_file(name: str) -> bool:
    """Whether only DeepSpeed names a file so."""
    return any(pattern.match(name) for pattern in STATE_FILES)


def is_tag_folder(folder: Path) -> bool:
    """Whether a folder holds such files."""
    return any(is_state_file(name) for name in list_names(folder))


def list_tag_files(folder: Path) -> TagFiles:
    """Sort the files of a tag folder.

    Raises:
        IncompleteCheckpointError: the folder is gone, or holds no model file.
        InconsistentCheckpointError: two files claim the same rank.
    """
    found: dict[re.Pattern[str], dict[tuple[int, ...], str]] = {pattern: {} for pattern in STATE_FILES}
    others: list[str] = []
    for name in list_names(folder):
        pattern = next((p for p in STATE_FILES if p.match(name)), None)
        if pattern is None:
            others.append(name)
            continue
        match = pattern.match(name)
        ranks = tuple(int(group or 0) for group in match.groups()) if match else ()
        known = found[pattern].setdefault(ranks, name)
        if known != name:
            raise InconsistentCheckpointError(
                "two files claim the same rank",
                file=folder,
                expected="one file for each rank",
                found=f"{known} and {name}",
                fix="one of them is left over from an older run: move it away",
            )
    if not found[_MODEL] and not found[_SHARDED_MODEL]:
        raise IncompleteCheckpointError(
            "the DeepSpeed folder has no model states",
            file=folder,
            expected="mp_rank_00_model_states.pt or zero_pp_rank_0_mp_rank_00_model_states.pt",
            found=", ".join(list_names(folder)[:8]) or "nothing",
        )
    return TagFiles(
        folder=folder,
        optim={(dp, mp): name for (dp, mp), name in found[_OPTIM].items()},
        models={mp: name for (mp,), name in found[_MODEL].items()},
        sharded_models={(dp, mp): name for (dp, mp), name in found[_SHARDED_MODEL].items()},
        layers={(layer, tp): name for (layer, tp), name in found[_LAYER].items()},
        experts={(layer, expert, mp): name for (layer, expert, mp), name in found[_EXPERT].items()},
        expert_optims=tuple(found[_EXPERT_OPTIM].values()),
        others=tuple(others),
    )


def tag_folders(save_folder: Path) -> list[Path]:
    """All tag folders directly below a folder that ``save_checkpoint`` was given."""
    try:
        with os.scandir(save_folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    return [save_folder / name for name in names if is_tag_folder(save_folder / name)]


def latest_tag(save_folder: Path) -> str | None:
    """The tag that ``latest`` names, else the one of ``latest_universal``; None where neither is a file."""
    for name in (LATEST, LATEST_UNIVERSAL):
        path = save_folder / name
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(save_folder)):
            continue
        try:
            with open(path, "rb") as file:
                return file.read(_MAX_TAG_BYTES).decode(errors="replace").strip()
        except OSError:
            continue
    return None


def is_plain_tag(tag: str) -> bool:
    """Whether a tag is the name of a folder beside ``latest``, and no way out of it."""
    return bool(tag) and tag not in (".", "..") and not any(c in tag for c in "/\\\0")
