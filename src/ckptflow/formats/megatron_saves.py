"""Whether the files of all ranks are one save, and each is in its own rank's directory.

A file does not tell its tensor- and pipeline-parallel rank, and files of two ranks hold tensors of the same names and
shapes: swapped ones give a model with its parts in the wrong places.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckptflow.errors import InconsistentCheckpointError
from ckptflow.formats.megatron_args import Grid, grid_of
from ckptflow.formats.megatron_states import RankState
from ckptflow.transforms.megatron_rules import EMBEDDING, FINAL_NORM

ITERATION = re.compile(r"iter_(\d+)")
_FIX = "copy the ranks' directories again from where they were saved"

Rank = tuple[int, int, int]
"""Tensor-, pipeline- and expert-parallel rank."""


def check_one_save(states: Mapping[Rank, RankState], grid: Grid, directory: Path) -> None:
    """All ranks saved the same step of the same run, and no file stands for two of them.

    Raises:
        InconsistentCheckpointError: a file is of another save or of another rank.
    """
    first = next(iter(states.values()))
    named = ITERATION.fullmatch(directory.name)
    expected = int(named[1]) if named else first.iteration
    for rank, state in states.items():
        if state.iteration != expected and state.iteration is not None:
            raise InconsistentCheckpointError(
                "a rank's file is of another step", file=state.file.path, expected=expected, found=state.iteration
            )
        if grid_of(state.args, state.file.path) != grid:
            raise InconsistentCheckpointError(
                "a rank's file is of a run with other ranks",
                file=state.file.path,
                expected=str(grid.mesh),
                found=str(grid_of(state.args, state.file.path).mesh),
            )
        if len(state.chunks) != len(states[(0, rank[1], 0)].chunks):
            raise InconsistentCheckpointError("ranks have different virtual pipeline stages", file=state.file.path)
    _check_no_copies(states)
    _check_order(states)


def _check_no_copies(states: Mapping[Rank, RankState]) -> None:
    """No two ranks hold the same matrices, but expert ranks of a stage without experts."""
    seen: dict[tuple[int, ...], Rank] = {}
    for rank, state in states.items():
        if not state.checksums:
            continue
        first = seen.setdefault(state.checksums, rank)
        if first != rank and (first[:2] != rank[:2] or state.has_experts):
            raise InconsistentCheckpointError(
                "two ranks' files hold the same weights: one was copied over the other",
                file=state.file.path,
                found=f"the matrices of {states[first].file.path}",
                fix=_FIX,
            )


def _check_order(states: Mapping[Rank, RankState]) -> None:
    """Global ranks grow along each axis of the grid, whatever the order of the axes (megatron/core/parallel_state.py).

    A tool that saves all ranks in one process writes one and the same number into all files.
    """
    for (tp, pp, ep), state in states.items():
        for neighbour in ((tp + 1, pp, ep), (tp, pp + 1, ep), (tp, pp, ep + 1)):
            here, there = state.args.get("rank"), states[neighbour].args.get("rank") if neighbour in states else None
            if type(here) is int and type(there) is int and there < here:
                raise InconsistentCheckpointError(
                    "a file was saved by another rank than its directory says",
                    file=states[neighbour].file.path,
                    expected=f"a global rank above {here}, which {Path(state.file.path).parent.name} has",
                    found=f"args.rank {there}",
                    fix=_FIX,
                )


def check_places(states: Mapping[Rank, RankState], offsets: Mapping[tuple[int, int], int]) -> None:
    """The embedding is in the first stage, and no layer follows the final norm.

    Args:
        states: all ranks.
        offsets: (pipeline rank, virtual stage) → number of its first layer, in the model's order.

    Raises:
        InconsistentCheckpointError: the files of pipeline ranks were swapped.
    """
    stages = [((0, pp, 0), states[(0, pp, 0)].chunks[chunk]) for pp, chunk in offsets]
    ends = [at for at, (_, names) in enumerate(stages) if any(name in names for name in FINAL_NORM.megatron)]
    after = [rank for rank, names in stages[ends[0] + 1 :] if _has_layers(names)] if ends else []
    first, names = stages[0]
    if EMBEDDING.megatron[0] in names and not after:
        return
    raise InconsistentCheckpointError(
        "pipeline stages are not in the model's order",
        file=states[after[0] if after else first].file.path,
        expected="the embedding in the first stage, and the final norm after all layers",
        found="layers after the final norm" if after else "a first stage without the embedding",
        fix=_FIX,
    )


def _has_layers(names: Iterable[str]) -> bool:
    return any(name.startswith("decoder.layers.") for name in names)
