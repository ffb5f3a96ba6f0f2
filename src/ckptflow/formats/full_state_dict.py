"""Full state dicts in one torch file: Accelerate's ``pytorch_model_fsdp.bin``, and .pt, .pth or .bin by their path."""

from __future__ import annotations

import re
from pathlib import Path

from ckptflow.formats.base import Completeness, Location, ReadOptions
from ckptflow.formats.config_files import find_config_dir
from ckptflow.formats.deepspeed_files import is_state_file
from ckptflow.formats.files import list_names
from ckptflow.formats.nested_state_dict import find_state_dict, open_mapping, read_state_dict
from ckptflow.formats.peft_config import CONFIG_NAME, adapter_spec
from ckptflow.formats.rank_files import OTHER_RANK_FILE, RANK_FILE
from ckptflow.formats.verdicts import check_whole_file
from ckptflow.formats.weight_sets import NOT_WEIGHTS, left_out_files
from ckptflow.manifest import CheckpointManifest, LeftOut
from ckptflow.transforms.prefix import share_first_part

# FSDP_MODEL_NAME of accelerate/utils/constants.py; the second model of a run has a number.
ACCELERATE_NAME = re.compile(r"^pytorch_model_fsdp(_\d+)?\.bin$")
SINGLE_FILE = re.compile(r"\.(bin|pt|pth)$")
# Where training scripts put the model when the optimizer goes into the same file.
MODEL_KEYS = ("model", "state_dict", "module", "model_state_dict")
_REASONS = {
    "optim": "optimizer state, not weights",
    "optimizer": "optimizer state, not weights",
    "optimizer_state_dict": "optimizer state, not weights",
    "lr_scheduler": "learning rate schedule, not weights",
}


class FullStateDict:
    """One torch file with all weights of one model."""

    layout = "full-state-dict"
    supersedes: tuple[str, ...] = ("huggingface", "peft")

    def find(self, path: Path) -> list[Location]:
        """See ``Format.find``. In a directory only Accelerate's name counts: a .pt there may be anything."""
        if path.is_file():
            known = RANK_FILE.match(path.name) or OTHER_RANK_FILE.match(path.name) or is_state_file(path.name)
            other = known or any(pattern.match(path.name) for pattern, _ in NOT_WEIGHTS)
            wanted = SINGLE_FILE.search(path.name) and not other
            return [Location(layout=self.layout, path=path, root=path.parent)] if wanted else []
        names = [name for name in list_names(path) if ACCELERATE_NAME.match(name)]
        return [Location(layout=self.layout, path=path / name, root=path) for name in names]

    def check(self, location: Location) -> Completeness:
        """See ``Format.check``: there is no marker, so it is complete if the file is whole."""
        return check_whole_file(self, location)

    def read(self, location: Location, options: ReadOptions) -> CheckpointManifest:
        """See ``Format.read``."""
        file, torch, top = open_mapping(location.path, location.root)
        at = find_state_dict(top, MODEL_KEYS, file.path)
        held = read_state_dict(file, torch, top, at, _REASONS)
        adapter, adapter_notes = adapter_spec(held.tensors, location.path.parent / CONFIG_NAME, location.root)
        config_dir = options.config_dir or find_config_dir(location.path.parent, location.root)
        return CheckpointManifest(
            layout=self.layout,
            path=location.path,
            global_step=location.global_step,
            tensors=held.tensors,
            ties=held.ties,
            left_out=(*held.left_out, *_beside(location)),
            files=(held.file,),
            storage_bytes=held.storage_bytes,
            wasted_bytes=held.wasted_bytes,
            config_dir=config_dir,
            wrapped=adapter is None and (config_dir is not None or share_first_part([*held.tensors, *held.ties])),
            adapter=adapter,
            notes=(
                *((f"the weights are under {'.'.join(at)!r} in the file",) if at else ()),
                *adapter_notes,
                *held.notes,
            ),
        )


def _beside(location: Location) -> list[LeftOut]:
    """What Accelerate puts beside the file; a file that was named by its path stands for itself."""
    if not ACCELERATE_NAME.match(location.path.name):
        return []
    return left_out_files(list_names(location.root), [location.path.name], location.root)
