"""DeepSpeed MoE: experts have files of their own, and under expert parallelism flat vectors of their own, too.

With expert-parallel size E, rank r belongs to expert group r mod E and numbers its experts from 0; files number them
globally (deepspeed/utils/groups.py, ``_create_expert_and_data_parallel``; engine.py, ``_save_moe_checkpoint``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ckptflow.errors import (
    IncompleteCheckpointError,
    InconsistentCheckpointError,
    UnsupportedCheckpointError,
)
from ckptflow.formats.deepspeed_files import STATE_FILES, TagFiles
from ckptflow.formats.deepspeed_states import ModelStates, tensors_in
from ckptflow.formats.deepspeed_zero import FlatSlice, join_group
from ckptflow.formats.files import checked_file
from ckptflow.formats.own_name import check_own_name
from ckptflow.formats.torch_tensors import source_of
from ckptflow.tensors import Shape, SourceFile, TensorSource
from ckptflow.torchfiles import TorchFile, open_torch_file

_EXPERT_NAME = re.compile(r"^(?P<before>.*\bdeepspeed_experts\.)(?P<expert>\d+)(?P<after>\..*)$")


def expert_copies(
    files: TagFiles, mp: int, root: Path, model: ModelStates, opened: Callable[[SourceFile, TorchFile], None]
) -> dict[str, TensorSource]:
    """The experts' weights in the compute dtype, under their global names.

    Raises:
        IncompleteCheckpointError: an expert that ``num_experts`` counts has no file.
        InconsistentCheckpointError: an expert file that it does not count, or two with one name.
    """
    found = {(layer, expert): name for (layer, expert, m), name in files.experts.items() if m == mp}
    counts = model.settings.get("num_experts")
    if not found and not counts:
        return {}
    layers = 1 + max((layer for layer, _ in found), default=0)
    per_layer = list(counts) if isinstance(counts, (list, tuple)) else [counts or 0] * layers
    wanted = {(layer, e) for layer, n in enumerate(per_layer) if isinstance(n, int) for e in range(min(n, 2**20))}
    if counts and wanted != set(found):
        missing, foreign = sorted(wanted - set(found)), sorted(set(found) - wanted)
        kind = IncompleteCheckpointError if missing else InconsistentCheckpointError
        raise kind(
            "the expert files are not those that num_experts counts",
            file=files.folder,
            expected=f"experts per MoE layer: {per_layer}",
            found=f"missing (layer, expert): {missing[:8]}; more than that: {foreign[:8]}",
        )
    copies: dict[str, TensorSource] = {}
    for key in sorted(found):
        file = checked_file(files.folder / found[key], root)
        torch = check_own_name(open_torch_file(file.path), *STATE_FILES)
        opened(file, torch)
        for fqn, tensor in tensors_in(torch.value, file, "the expert's weights").items():
            if fqn in copies:
                raise InconsistentCheckpointError("two expert files hold one name", file=file.path, tensor=fqn)
            copies[fqn] = source_of(fqn, tensor, file)
    return copies


def join_expert_group(
    shapes: Mapping[str, Shape],
    slices: Sequence[FlatSlice],
    share: int,
    copies: Mapping[str, TensorSource],
    file: SourceFile,
) -> dict[str, TensorSource]:
    """Masters of a param group that only ``share`` ranks cut among themselves, under global names.

    Every result has a copy in an expert file, so that a wrong order can't pass.

    Raises:
        UnsupportedCheckpointError: the group is not one of experts, or no copy proves the order.
    """
    groups = len(slices) // share
    if groups * share != len(slices):
        raise _refused(file, f"{share} ranks a group", f"{len(slices)} ranks")
    locals_: dict[str, set[str]] = {}  # MoE layer → its experts' numbers within a group; layers may have more or fewer
    for named in filter(None, map(_EXPERT_NAME.match, shapes)):
        locals_.setdefault(named["before"], set()).add(named["expert"])
    tensors: dict[str, TensorSource] = {}
    for group in range(groups):
        joined = join_group(shapes, slices[group::groups])
        for fqn, source in joined.items():
            match = _EXPERT_NAME.match(fqn)
            if match is None:
                raise _refused(file, "names of experts", fqn)
            expert = group * len(locals_[match["before"]]) + int(match["expert"])
            name = f"{match['before']}{expert}{match['after']}"
            if name not in copies:
                raise _refused(file, f"an expert file with {name}", "none")
            tensors[name] = source
    return tensors


def _refused(file: SourceFile, expected: object, found: object) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        "a DeepSpeed MoE checkpoint with expert parallelism that can't be joined for sure",
        file=file.path,
        expected=expected,
        found=found,
        fix="convert it with deepspeed.checkpoint.ds_to_universal first",
    )
