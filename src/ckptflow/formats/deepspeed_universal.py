"""DeepSpeed's universal checkpoints: ``zero/<name>/fp32.pt``, one file a parameter, made by ds_to_universal.

From ZeRO 1 and 2 the file holds ``{"param": tensor, "cat_dim": …}``, from ZeRO 3 a bare flat tensor whose shape only
the model states know. The model states of the source are copied beside ``zero/``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from ckptflow.errors import CorruptFileError, IncompleteCheckpointError, InconsistentCheckpointError
from ckptflow.formats.deepspeed_files import UNIVERSAL_FOLDER, TagFiles
from ckptflow.formats.deepspeed_states import ModelStates, read_model_states
from ckptflow.formats.deepspeed_weights import ROUNDS, Weights, add_frozen
from ckptflow.formats.files import checked_file
from ckptflow.formats.torch_tensors import plain_tensor, source_of
from ckptflow.manifest import EqualSources, LeftOut
from ckptflow.tensors import Shape, SourceFile, TensorSource, whole
from ckptflow.torchfiles import LazyTensor, open_torch_file

MASTER_NAME = "fp32.pt"


def read_universal(files: TagFiles, root: Path) -> Weights:
    """All parameters of a universal checkpoint.

    Raises:
        IncompleteCheckpointError: a parameter that the model states name has no file.
        InconsistentCheckpointError: a shape differs, or a parameter that they don't name.
    """
    names = [files.models[mp] for mp in sorted(files.models)] or [
        files.sharded_models[k] for k in sorted(files.sharded_models)
    ]
    models = [read_model_states(files.folder / name, root) for name in names]
    weights = Weights(model=models[0], dp_world_size=models[0].number("dp_world_size") or 1)
    for model in models:
        weights.opened(model.file, model.torch)
    folder = files.folder / UNIVERSAL_FOLDER
    shapes, frozen, shared = _wanted(models)
    present = _parameter_names(folder)
    # From ZeRO 3 ds_to_universal leaves frozen parameters where they were: a fragment in each rank's model file.
    apart = {fqn: shape for fqn, shape in frozen.items() if fqn not in present and not files.models}
    if missing := sorted({*shapes, *frozen} - present - apart.keys()):
        raise IncompleteCheckpointError(
            f"{len(missing)} parameters of a universal checkpoint have no file",
            file=folder,
            tensor=missing[0],
            expected=f"{missing[0]}/{MASTER_NAME}",
        )
    buffers = {name for model in models for name in model.buffer_names}
    if foreign := sorted(present - {*shapes, *frozen, *shared, *buffers}):
        raise InconsistentCheckpointError(
            "a universal checkpoint holds parameters that its model states don't name", file=folder, tensor=foreign[0]
        )
    whole_shapes = len(files.models) <= 1
    for fqn, shape in {**shapes, **frozen}.items():
        if fqn in apart:
            continue
        weights.tensors[fqn] = _read_master(weights, fqn, folder / fqn / MASTER_NAME, root, shape, exact=whole_shapes)
    add_frozen(weights, models, apart, sharded=True)
    weights.ties |= {alias: owner for alias, owner in shared.items() if alias not in weights.tensors}
    _add_module(weights, models, whole_shapes)
    weights.left_out.append(
        LeftOut(name=UNIVERSAL_FOLDER, reason="optimizer state, not weights", nbytes=_moment_bytes(folder, present))
    )
    weights.left_out += [LeftOut(name=key, reason="client state of the trainer") for key in models[0].client_keys]
    return weights


def _wanted(models: Sequence[ModelStates]) -> tuple[dict[str, Shape], dict[str, Shape], dict[str, str]]:
    shapes: dict[str, Shape] = {}
    frozen: dict[str, Shape] = {}
    shared: dict[str, str] = {}
    for model in models:
        if model.param_shapes is None:
            raise InconsistentCheckpointError("the model states name no parameters", file=model.file.path)
        shapes |= {fqn: shape for group in model.param_shapes for fqn, shape in group.items()}
        frozen |= model.frozen_shapes
        shared |= model.shared
    return shapes, frozen, shared


def _parameter_names(folder: Path) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
    except FileNotFoundError as error:
        raise IncompleteCheckpointError("the universal checkpoint has no parameters", file=folder) from error


def _read_master(weights: Weights, fqn: str, path: Path, root: Path, shape: Shape, *, exact: bool) -> TensorSource:
    file = checked_file(path, root)
    torch = open_torch_file(path)
    weights.opened(file, torch)
    value = torch.value.get("param") if isinstance(torch.value, Mapping) else torch.value
    if not isinstance(value, LazyTensor):
        raise CorruptFileError("no parameter in a universal checkpoint's file", file=path, tensor=fqn)
    source = source_of(fqn, value, file)
    if source.shape == shape or (not exact and len(source.shape) == len(shape)):
        return source
    return _unflattened(fqn, value, file, source, shape)


def _unflattened(fqn: str, value: LazyTensor, file: SourceFile, source: TensorSource, shape: Shape) -> TensorSource:
    flat = plain_tensor(fqn, value, file.path)
    if len(source.shape) != 1 or source.numel != prod(shape) or not flat.is_contiguous:
        raise InconsistentCheckpointError(
            "a parameter of a universal checkpoint has another shape than the model states say",
            file=file.path,
            tensor=fqn,
            expected=list(shape),
            found=list(source.shape),
        )
    return whole(file, flat.byte_offset, shape, source.dtype)


def _add_module(weights: Weights, models: Sequence[ModelStates], whole_shapes: bool) -> None:
    """Buffers come from ``module``; of everything else it is the copy that the masters must round to."""
    if not whole_shapes:
        weights.notes.append("the copies in the compute dtype are cut by rank and were not compared")
    module = (models[0].module or {}) if whole_shapes else {}
    for fqn, tensor in module.items():
        if not tensor.numel or fqn in weights.ties:
            continue
        source = source_of(fqn, tensor, models[0].file)
        master = weights.tensors.get(fqn)
        if master is None:
            weights.tensors[fqn] = source
        elif master.shape != source.shape:
            raise InconsistentCheckpointError(
                "a universal checkpoint and its model states disagree on a shape",
                file=models[0].file.path,
                tensor=fqn,
                expected=list(master.shape),
                found=list(source.shape),
            )
        else:
            weights.equal.append(EqualSources(fqn=fqn, first=master, second=source, reason=ROUNDS))
    known = [fqn for fqn in module if fqn in weights.tensors]
    weights.tensors = {fqn: weights.tensors[fqn] for fqn in dict.fromkeys([*known, *weights.tensors])}
    for alias, owner in weights.ties.items():
        if owner not in weights.tensors:
            raise InconsistentCheckpointError(
                "a shared parameter names an owner that is not there",
                file=models[0].file.path,
                tensor=alias,
                found=owner,
            )


def _moment_bytes(folder: Path, names: set[str]) -> int:
    total = 0
    for directory in (folder, *(folder / name for name in sorted(names))):
        with os.scandir(directory) as entries:
            total += sum(
                e.stat().st_size for e in entries if e.is_file() and e.name.endswith(".pt") and e.name != MASTER_NAME
            )
    return total
