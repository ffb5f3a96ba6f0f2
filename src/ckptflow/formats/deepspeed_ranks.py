"""The model and optimizer files of one model-parallel rank: all there, none foreign, all of one save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptflow.errors import (
    CkptflowError,
    IncompleteCheckpointError,
    InconsistentCheckpointError,
    UnsupportedCheckpointError,
)
from ckptflow.formats.deepspeed_files import TagFiles
from ckptflow.formats.deepspeed_states import ModelStates, OptimStates, read_model_states, read_optim_states
from ckptflow.tensors import SourceFile


def read_rank_files(files: TagFiles, mp: int, root: Path) -> tuple[list[ModelStates], list[OptimStates]]:
    """Model files (one, or one a rank under stage 3) and optimizer files (none at stage 0), in rank order.

    Raises:
        CheckpointError: files are missing, foreign, or contradict each other.
    """
    names = {dp: name for (dp, m), name in sorted(files.optim.items()) if m == mp}
    optims = {dp: read_optim_states(files.folder / name, root) for dp, name in names.items()}
    models = _read_models(files, mp, root, list(optims.values()))
    if optims:
        _check_ranks(optims, models, files, mp)
    else:
        _check_stage_0(models[0], files, mp)
    return models, list(optims.values())


def _read_models(files: TagFiles, mp: int, root: Path, optims: Sequence[OptimStates]) -> list[ModelStates]:
    shared, sharded = files.models.get(mp), {dp: n for (dp, m), n in files.sharded_models.items() if m == mp}
    if shared and sharded:
        raise InconsistentCheckpointError(
            "model states of two ZeRO stages lie in one folder",
            file=files.folder,
            found=f"{shared} and {sharded[min(sharded)]}",
            fix="one of them is left over from an older run: move it away",
        )
    if optims and optims[0].sharded_params:
        _check_complete("model states", sharded, max(optims[0].partition_counts), files.folder, mp)
    elif shared is None:
        raise IncompleteCheckpointError(
            "the model states of a rank are missing", file=files.folder, expected=f"mp_rank_{mp:02d}_model_states.pt"
        )
    names = [sharded[dp] for dp in sorted(sharded)] or [shared or ""]
    return [read_model_states(files.folder / name, root) for name in names]


def _check_complete(what: str, found: Mapping[int, str], world: int, folder: Path, mp: int) -> None:
    missing = sorted(set(range(world)) - set(found))
    foreign = [found[dp] for dp in sorted(found) if dp >= world]
    if foreign:
        raise InconsistentCheckpointError(
            f"{what} of ranks that this checkpoint does not have",
            file=folder,
            expected=f"{world} ranks, as partition_count says",
            found=", ".join(foreign[:8]),
            fix="they are left over from a wider run: move them away",
        )
    if missing:
        raise IncompleteCheckpointError(
            f"{what} of {len(missing)} of {world} data-parallel ranks are missing",
            file=folder,
            expected=f"files of ranks 0 to {world - 1} (mp rank {mp})",
            found=f"none of ranks {', '.join(map(str, missing[:8]))}",
            fix="wait until all ranks have saved, or copy the missing files",
        )


def _check_ranks(optims: Mapping[int, OptimStates], models: Sequence[ModelStates], files: TagFiles, mp: int) -> None:
    """All ranks are there, and all of one save."""
    first = optims[min(optims)]
    world = max(first.partition_counts)
    group = models[0].zero_config("mics_shard_size")
    if isinstance(group, int) and group > 0:
        raise UnsupportedCheckpointError(
            "DeepSpeed MiCS checkpoints are not supported", file=files.folder, found=f"mics_shard_size {group}"
        )
    for dp, state in optims.items():
        if dp < world and state.partition_counts != first.partition_counts:
            raise mixed_saves("partition_count", state.file, first.partition_counts, state.partition_counts)
    _check_complete("optimizer states", {dp: files.optim[dp, mp] for dp in optims}, world, files.folder, mp)
    for state in optims.values():
        if state.sharded_params != first.sharded_params or len(state.masters) != len(first.masters):
            raise mixed_saves("param groups", state.file, len(first.masters), len(state.masters))
        if state.steps and first.steps and state.steps != first.steps:
            raise mixed_saves("optimizer step", state.file, first.steps, state.steps)
        for what, expected in first.common.items():
            if None not in (expected, state.common[what]) and state.common[what] != expected:
                raise mixed_saves(what, state.file, expected, state.common[what])
    for model in models:
        for key, expected in (("global_steps", models[0].number("global_steps")), ("dp_world_size", world)):
            if model.number(key) not in (None, expected):
                raise mixed_saves(key, model.file, expected, model.number(key))


def mixed_saves(what: str, file: SourceFile, expected: object, found: object) -> CkptflowError:
    """The refusal of files that can't be of one save."""
    return InconsistentCheckpointError(
        f"the files of one checkpoint disagree on {what}",
        file=file.path,
        expected=expected,
        found=found,
        fix="a file is left over from another save: let the trainer write the checkpoint again",
    )


def _check_stage_0(model: ModelStates, files: TagFiles, mp: int) -> None:
    stage = model.zero_config("stage")
    name = f"*zero_pp_rank_0_mp_rank_{mp:02d}_optim_states.pt"
    if model.param_shapes is None and (stage == 0 or model.settings.get("optimizer") is not None):
        return
    raise IncompleteCheckpointError(
        "the optimizer states are missing, and with them the fp32 masters",
        file=files.folder,
        expected=name if stage is None else f"{name}: it was trained with ZeRO {stage}",
        found="model states alone",
        fix="copy the optim_states files of all ranks",
    )
