"""What one model-parallel rank holds: masters joined over its data-parallel ranks, frozen weights, buffers, ties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from ckptflow.errors import (
    CkptflowError,
    IncompleteCheckpointError,
    InconsistentCheckpointError,
    UnsupportedCheckpointError,
)
from ckptflow.formats.deepspeed_experts import expert_copies, join_expert_group
from ckptflow.formats.deepspeed_files import TagFiles
from ckptflow.formats.deepspeed_masters import name_masters
from ckptflow.formats.deepspeed_ranks import mixed_saves, read_rank_files
from ckptflow.formats.deepspeed_states import ModelStates, OptimStates
from ckptflow.formats.deepspeed_zero import FlatSlice, join_fragments, join_group, join_sharded, recorded_shapes
from ckptflow.formats.torch_tensors import dtype_of, shared_windows, source_of, storage_use
from ckptflow.manifest import EqualSources, LeftOut
from ckptflow.tensors import Shape, SourceFile, TensorSource
from ckptflow.torchfiles import LazyTensor, TorchFile

# ZeRO++ keeps frozen weights as int8 and their scales in an attribute, which saving loses (partition_parameters.py).
_QUANTIZED = "zero_quantized_nontrainable_weights"
ROUNDS = "the fp32 master does not round to the 16-bit copy beside it: the files are of different saves"


@dataclass(slots=True, kw_only=True)
class Weights:
    """Gathered while the files of one model-parallel rank are read.

    Attributes:
        model: the model file of dp rank 0.
        dp_world_size: data-parallel ranks.
        tensors: FQN → source.
        copies: FQN → the copy in the compute dtype that the master must round to.
        ties: alias → owner.
        equal: sources that must hold the same bits.
        left_out: what is not in ``tensors``.
        notes: for people.
        files: all files that were opened.
        storage_bytes: bytes of all storages in them.
        wasted_bytes: bytes that no view covers.
    """

    model: ModelStates
    dp_world_size: int
    tensors: dict[str, TensorSource] = field(default_factory=dict)
    copies: dict[str, TensorSource] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    equal: list[EqualSources] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[SourceFile] = field(default_factory=list)
    storage_bytes: int = 0
    wasted_bytes: int = 0

    def opened(self, file: SourceFile, torch: TorchFile) -> None:
        """Account for one file."""
        self.files.append(file)
        self.storage_bytes += sum(storage.nbytes for storage in torch.storages)


def read_weights(files: TagFiles, mp: int, root: Path, layers: Mapping[str, Shape]) -> Weights:
    """Read model-parallel rank ``mp``; weights of pipeline layers are not in it unless there are masters of them.

    ``layers``: shapes of the pipeline layers' weights, for model states that tell none.

    Raises:
        CheckpointError: files are missing, foreign, contradict each other, or say something unknown.
    """
    models, optims = read_rank_files(files, mp, root)
    weights = Weights(model=models[0], dp_world_size=len(optims) or models[0].number("dp_world_size") or 1)
    for model in models:
        weights.opened(model.file, model.torch)
    weights.copies = expert_copies(files, mp, root, models[0], weights.opened)
    if optims:
        module = {fqn: tensor.shape for fqn, tensor in (models[0].module or {}).items()}
        _add_masters(weights, optims, {**module, **layers})
        add_frozen(weights, models, models[0].frozen_shapes, sharded=optims[0].sharded_params)
    _add_module(weights, in_zero=bool(optims))
    _add_left_out(weights, optims, files)
    return weights


def _slices(state: OptimStates, model: ModelStates) -> list[FlatSlice]:
    paddings, fragments = state.paddings, state.fragments
    if model.zero_config("round_robin_gradients") is True and not state.alignment_paddings:
        # Flat vector and param_shapes are in the order of the rounds, which the copies in `module` prove; the fragments
        # are recorded as if they were not (_link_all_hp_params in deepspeed/runtime/zero/stage_1_and_2.py).
        fragments = None
    count = len(state.masters)
    return [
        FlatSlice(
            file=state.file,
            offset_bytes=tensor.byte_offset,
            numel=tensor.numel,
            dtype=dtype_of("fp32 partition", tensor.dtype_name, state.file.path),
            padding=paddings[group] if paddings and len(paddings) == count else None,
            fragments=fragments[group] if fragments and len(fragments) == count else None,
        )
        for group, tensor in enumerate(state.masters)
    ]


def _add_masters(weights: Weights, optims: Sequence[OptimStates], known: Mapping[str, Shape]) -> None:
    model, first = weights.model, optims[0]
    ranks = [_slices(state, model) for state in optims]
    shapes = recorded_shapes(ranks, known) if model.param_shapes is None else model.param_shapes
    for state in optims:
        weights.opened(state.file, state.torch)
    _, weights.wasted_bytes = storage_use(tensor for state in optims for tensor in state.masters)
    if first.sharded_params:
        merged = {fqn: shape for group in shapes for fqn, shape in group.items()}
        weights.tensors |= join_sharded(merged, ranks)
        return
    if len(shapes) != len(first.masters):
        raise mixed_saves("the number of param groups", first.file, len(shapes), len(first.masters))
    counts = first.partition_counts
    for group, names in enumerate(shapes):
        slices = [rank[group] for rank in ranks]
        share = counts[group] if len(counts) == len(shapes) else len(ranks)
        if share < len(ranks):
            joined = join_expert_group(names, slices, share, weights.copies, first.file)
        else:
            joined = join_group(names, slices, padded_params=first.alignment_paddings)
        if repeated := joined.keys() & weights.tensors.keys():
            raise InconsistentCheckpointError(
                "a parameter is in two groups", file=model.file.path, tensor=min(repeated)
            )
        weights.tensors |= joined


def add_frozen(weights: Weights, models: Sequence[ModelStates], shapes: Mapping[str, Shape], *, sharded: bool) -> None:
    """Frozen parameters have no master: stage 1, 2 keeps them whole, stage 3 a fragment a rank.

    Raises:
        CheckpointError: the model files don't hold them whole.
    """
    for fqn, shape in shapes.items():
        fragments = [(model.file, model.frozen_fragments.get(fqn)) for model in models]
        slices = [_fragment(fqn, file, tensor) for file, tensor in fragments]
        if sum(part.numel for part in slices) < prod(shape):
            raise _lost([fqn], models[0].file)
        if sharded and slices[0].dtype.kind != "float" and weights.model.zero_config(_QUANTIZED):
            raise UnsupportedCheckpointError(
                "a frozen weight that ZeRO++ quantized: its scales are in no file",
                file=models[0].file.path,
                tensor=fqn,
                found=f"{slices[0].dtype.name}, and {_QUANTIZED} in ds_config",
                fix="take the frozen weights from the model that training began with, or save without that option",
            )
        first = fragments[0][1]
        if sharded:
            weights.tensors[fqn] = join_fragments(fqn, shape, slices)
        elif first is not None and first.shape == shape:
            weights.tensors[fqn] = source_of(fqn, first, fragments[0][0])
        else:
            raise mixed_saves(
                "the shape of a frozen parameter", models[0].file, list(shape), first and list(first.shape)
            )


def _fragment(fqn: str, file: SourceFile, tensor: LazyTensor | None) -> FlatSlice:
    if tensor is None:
        raise _lost([fqn], file)
    dtype = dtype_of(fqn, tensor.dtype_name, file.path)
    return FlatSlice(file=file, offset_bytes=tensor.byte_offset, numel=tensor.numel, dtype=dtype)


def _lost(names: Sequence[str], file: SourceFile) -> CkptflowError:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return IncompleteCheckpointError(
        "weights are in no file of the checkpoint: only an empty tensor or a part was saved",
        file=file.path,
        tensor=", ".join(names[:5]) + more,
        expected="a trained parameter, a frozen fragment, or a non-empty tensor in `module`",
        fix="they were frozen or partitioned when the checkpoint was saved; save again with a newer DeepSpeed",
    )


def _add_module(weights: Weights, *, in_zero: bool) -> None:
    """Compare ``module`` with what is known by now, and take from it what nothing else holds."""
    model = weights.model
    module = model.module or {}
    weights.ties |= {alias: owner for alias, owner in model.shared.items() if alias not in weights.tensors}
    aliases = shared_windows(module)
    masters, note = ({}, None) if in_zero else name_masters(model, aliases, experts=bool(weights.copies))
    weights.notes += [note] if note else []
    lost: list[str] = []
    for fqn, tensor in module.items():
        source = source_of(fqn, tensor, model.file)
        owner = weights.ties.get(fqn)
        if fqn in weights.tensors:
            if tensor.numel:
                weights.copies[fqn] = source
        elif owner is not None:
            if tensor.numel and aliases.get(fqn, fqn) != aliases.get(owner, owner):
                weights.copies[fqn] = source
        elif not tensor.numel:
            lost.append(fqn)
        elif known := _known_mate(fqn, aliases, weights.tensors):
            weights.ties[fqn] = known
        elif fqn in masters:
            weights.tensors[fqn], weights.copies[fqn] = masters[fqn], source
        else:
            weights.tensors[fqn] = source
    if lost:
        raise _lost(lost, model.file)
    _adopt_copies(weights, in_zero=in_zero)
    _order_as(weights, list(module))
    _prove(weights)


def _known_mate(fqn: str, aliases: Mapping[str, str], known: Mapping[str, TensorSource]) -> str | None:
    """A name on the same window of the same storage that has a tensor already; None where there is none."""
    first = aliases.get(fqn, fqn)
    mates = [first, *(alias for alias, owner in aliases.items() if owner == first)]
    return next((mate for mate in mates if mate in known), None)


def _adopt_copies(weights: Weights, *, in_zero: bool) -> None:
    """Without ZeRO the experts' files are all there is of them; with it, they hold nothing that has no master."""
    for fqn, source in weights.copies.items():
        if fqn in weights.tensors or fqn in weights.ties:
            continue
        if in_zero:
            raise InconsistentCheckpointError(
                "an expert file holds a tensor that no optimizer state and no frozen parameter stands for",
                file=source.pieces[0].file.path if source.pieces else None,
                tensor=fqn,
            )
        weights.tensors[fqn] = source


def _order_as(weights: Weights, names: Sequence[str]) -> None:
    """The model's own order, which ``module`` has and param groups have not."""
    known = [fqn for fqn in names if fqn in weights.tensors]
    weights.tensors = {fqn: weights.tensors[fqn] for fqn in dict.fromkeys([*known, *weights.tensors])}


def _prove(weights: Weights) -> None:
    for alias, owner in weights.ties.items():
        if owner not in weights.tensors:
            raise InconsistentCheckpointError(
                "a shared parameter names an owner that is not there",
                file=weights.model.file.path,
                tensor=alias,
                found=owner,
            )
    for fqn, copy in weights.copies.items():
        master = weights.tensors[weights.ties.get(fqn, fqn)]
        if master is copy:
            continue
        if master.shape != copy.shape:
            raise mixed_saves(f"the shape of {fqn}", weights.model.file, list(master.shape), list(copy.shape))
        weights.equal.append(EqualSources(fqn=fqn, first=master, second=copy, reason=ROUNDS))


def _add_left_out(weights: Weights, optims: Sequence[OptimStates], files: TagFiles) -> None:
    model = weights.model
    masters = {id(t.storage): t.storage.nbytes for state in optims for t in state.masters}
    moments = sum(s.nbytes for state in optims for s in state.torch.storages) - sum(masters.values())
    if moments:
        weights.left_out.append(
            LeftOut(name="optimizer_state_dict", reason="optimizer state, not weights", nbytes=moments)
        )
    if model.settings.get("optimizer") is not None:
        used = {id(t.storage) for t in (model.module or {}).values()}
        nbytes = sum(s.nbytes for s in model.torch.storages if id(s) not in used)
        weights.left_out.append(LeftOut(name="optimizer", reason="optimizer state, not weights", nbytes=nbytes))
    copies = sum(copy.nbytes for fqn, copy in weights.copies.items() if weights.tensors.get(fqn) is not copy)
    if copies:
        reason = "copy in the compute dtype; compared with the fp32 masters, which are written"
        weights.left_out.append(LeftOut(name="module", reason=reason, nbytes=copies))
    weights.left_out += [LeftOut(name=name, reason="extra state of a module, not a tensor") for name in model.extras]
    weights.left_out += [LeftOut(name=key, reason="client state of the trainer") for key in model.client_keys]
    weights.left_out += [LeftOut(name=name, reason="optimizer state of experts") for name in files.expert_optims]
    weights.left_out += [LeftOut(name=name, reason="not a state file of DeepSpeed") for name in files.others]
