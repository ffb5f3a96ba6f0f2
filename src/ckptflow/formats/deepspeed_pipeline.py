"""DeepSpeed pipelines: ``layer_NN-model_states.pt`` holds one layer's weights under names inside the layer.

``mp_rank_0S`` counts stages, and ZeRO joins within a stage. Names in the model are ``<layer>.<name>``, as
PipelineModule itself has them (deepspeed/runtime/pipe/module.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptflow.errors import IncompleteCheckpointError, InconsistentCheckpointError, UnsupportedCheckpointError
from ckptflow.formats.deepspeed_files import STATE_FILES, TagFiles
from ckptflow.formats.deepspeed_states import tensors_in
from ckptflow.formats.deepspeed_weights import ROUNDS, Weights
from ckptflow.formats.files import checked_file
from ckptflow.formats.own_name import check_own_name
from ckptflow.formats.torch_tensors import source_of
from ckptflow.manifest import EqualSources
from ckptflow.tensors import Shape, TensorSource
from ckptflow.torchfiles import LazyTensor, open_torch_file


def join_pipeline(
    files: TagFiles, stages: Sequence[Weights], root: Path
) -> tuple[dict[str, TensorSource], list[EqualSources]]:
    """All layers' weights: masters where ZeRO keeps them, else the layer files'; and the proof that they agree.

    Raises:
        IncompleteCheckpointError: a layer file is missing.
        UnsupportedCheckpointError: modules are tied across stages, or cut by tensor parallelism.
    """
    if any(tp for _, tp in files.layers):
        raise _refused(files, "pipeline and tensor parallelism together")
    layers = _read_layers(files, stages, root)
    masters: dict[str, TensorSource] = {}
    for stage in stages:
        masters |= stage.tensors
    if any(fqn.startswith("tied_modules.") for fqn in masters):
        raise _refused(files, "modules that are tied across stages")
    if masters:
        if missing := sorted(masters.keys() - layers.keys()):
            raise IncompleteCheckpointError(
                "layer files of the pipeline are missing",
                file=files.folder,
                tensor=missing[0],
                found=f"{len(missing)} parameters that no layer file holds",
            )
        _check_masters(files, stages, masters, layers)
    else:
        _check_counts(files, stages, layers)
    equal = [
        EqualSources(fqn=fqn, first=masters[fqn], second=source, reason=ROUNDS)
        for fqn, source in layers.items()
        if fqn in masters
    ]
    for check in equal:
        if check.first.shape != check.second.shape:
            raise InconsistentCheckpointError(
                "a layer file and the masters disagree on a shape",
                file=files.folder,
                tensor=check.fqn,
                expected=list(check.first.shape),
                found=list(check.second.shape),
            )
    return {fqn: masters.get(fqn, source) for fqn, source in layers.items()}, equal


def layer_shapes(files: TagFiles, root: Path) -> dict[str, Shape]:
    """The shape of each tensor in the layer files."""
    shapes: dict[str, Shape] = {}
    for (layer, _), name in sorted(files.layers.items()):
        file = checked_file(files.folder / name, root)
        tensors = tensors_in(open_torch_file(file.path).value, file, "the layer's weights")
        shapes |= {f"{layer}.{name}": tensor.shape for name, tensor in tensors.items()}
    return shapes


def _check_masters(
    files: TagFiles, stages: Sequence[Weights], masters: Mapping[str, TensorSource], layers: Mapping[str, TensorSource]
) -> None:
    """A layer without masters is one of a stage that is missing, unless its weights are buffers or frozen."""
    expected = {name for stage in stages for name in (*stage.model.buffer_names, *stage.model.frozen_shapes)}
    if orphans := sorted(layers.keys() - masters.keys() - expected):
        raise IncompleteCheckpointError(
            "no stage of the pipeline holds masters for a layer",
            file=files.folder,
            tensor=orphans[0],
            found=f"{len(orphans)} parameters in layer files alone",
            fix="copy the files of all stages of this save, and none of another one",
        )


def _read_layers(files: TagFiles, stages: Sequence[Weights], root: Path) -> dict[str, TensorSource]:
    tensors: dict[str, TensorSource] = {}
    contents: dict[object, str] = {}
    for layer, tp in sorted(files.layers):
        file = checked_file(files.folder / files.layers[layer, tp], root)
        torch = check_own_name(open_torch_file(file.path), *STATE_FILES)
        stages[0].opened(file, torch)
        values = tensors_in(torch.value, file, "the layer's weights")
        for name, tensor in values.items():
            tensors[f"{layer}.{name}"] = source_of(f"{layer}.{name}", tensor, file)
        same = contents.setdefault(_fingerprint(values), file.path) if values else file.path
        if same != file.path:
            raise _refused(files, f"layers that are tied: {Path(same).name} and {Path(file.path).name} are equal")
    return tensors


def _fingerprint(values: Mapping[str, LazyTensor]) -> object:
    """Equal for layers with equal weights, by the zip's checksums; tied modules are saved with each of their layers."""
    parts = tuple((name, t.shape, t.storage_offset, t.storage.crc32) for name, t in sorted(values.items()))
    return parts if all(crc is not None for *_, crc in parts) else id(values)


def _check_counts(files: TagFiles, stages: Sequence[Weights], layers: Mapping[str, TensorSource]) -> None:
    """Without ZeRO nothing names the parameters; the optimizers of all stages tell how many there are."""
    counted = 0
    for stage in stages:
        optimizer = stage.model.settings.get("optimizer")
        groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
        if not isinstance(optimizer, Mapping) or not isinstance(groups, (list, tuple)):
            raise _refused(
                files, "a stage without ZeRO and without an optimizer: nothing tells how many layers there are"
            )
        if "fp32_groups" in optimizer or "fp32_groups_flat" in optimizer:
            raise _refused(files, "16-bit training without ZeRO: the fp32 masters have no names")
        counted += sum(len(g["params"]) for g in groups if isinstance(g, Mapping) and isinstance(g.get("params"), list))
    buffers = {name for stage in stages for name in stage.model.buffer_names}
    trained = [fqn for fqn in layers if fqn not in buffers]
    if counted != len(trained):
        kind = IncompleteCheckpointError if counted > len(trained) else InconsistentCheckpointError
        raise kind(
            "the layer files of the pipeline don't hold what its optimizers trained",
            file=files.folder,
            expected=f"{counted} parameters",
            found=f"{len(trained)} in {len(files.layers)} layer files",
            fix="copy all layer_*-model_states.pt files of this save, and none of another one; a module that stages "
            "share lies in one file and is counted in each stage: save such a pipeline with ZeRO 1, and convert it "
            "with deepspeed.checkpoint.ds_to_universal first",
        )


def _refused(files: TagFiles, found: str) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        "a DeepSpeed pipeline checkpoint that can't be joined for sure",
        file=files.folder,
        found=found,
        fix="convert it with deepspeed.checkpoint.ds_to_universal first",
    )
