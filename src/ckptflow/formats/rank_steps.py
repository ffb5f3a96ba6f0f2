"""Whether the rank files of a directory are of one step: shards of two steps have the same names, shapes and meshes.

Nothing in a rank's weights tells the step. verl saves the learning rate schedule beside them, which counts steps, and
who gathers the nodes' files from two steps mostly copies it along.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckptflow.errors import CheckpointError, InconsistentCheckpointError
from ckptflow.formats.files import checked_file
from ckptflow.formats.rank_files import RankSet
from ckptflow.torchfiles import open_torch_file

# It holds some counters and the states of random generators.
MAX_BYTES = 10**8


def check_one_step(directory: Path, root: Path, chosen: RankSet) -> None:
    """Compare the step counters beside the weights; files that are not there or can't be read tell nothing.

    Raises:
        InconsistentCheckpointError: the ranks counted different steps.
    """
    first: tuple[str, int] | None = None
    for name in chosen.names.values():
        beside = name.replace("model_", "extra_state_", 1)
        step = _scheduled_step(directory / beside, root)
        if step is None:
            continue
        first = first or (beside, step)
        if step != first[1]:
            raise InconsistentCheckpointError(
                "the rank files are of different steps",
                file=directory / beside,
                expected=f"{first[1]} steps of the learning rate schedule, as in {first[0]}",
                found=step,
                fix="copy the files of all ranks from one step again",
            )


def _scheduled_step(path: Path, root: Path) -> int | None:
    if not path.is_file():
        return None
    try:
        file = checked_file(path, root)
        value = open_torch_file(file.path).value if file.nbytes <= MAX_BYTES else None
    except CheckpointError:
        return None
    schedule = value.get("lr_scheduler") if isinstance(value, Mapping) else None
    step = schedule.get("last_epoch") if isinstance(schedule, Mapping) else None
    return step if type(step) is int else None
