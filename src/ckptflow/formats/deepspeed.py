"""DeepSpeed checkpoints: ZeRO 0 to 3, universal, MoE, pipelines and AutoTP, as save_checkpoint leaves them.

``SAVE/latest`` names a tag folder in SAVE; a tag folder can also be given itself, as Lightning's ``x.ckpt/checkpoint``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckptflow.errors import CheckpointError, IncompleteCheckpointError, InconsistentCheckpointError
from ckptflow.formats.base import Completeness, Location, ReadOptions
from ckptflow.formats.config_files import find_config_dir
from ckptflow.formats.deepspeed_copies import prove_by_copy_beside
from ckptflow.formats.deepspeed_files import (
    UNIVERSAL_FOLDER,
    TagFiles,
    is_plain_tag,
    is_tag_folder,
    latest_tag,
    list_tag_files,
    tag_folders,
)
from ckptflow.formats.deepspeed_parallel import join_tensor_parallel
from ckptflow.formats.deepspeed_pipeline import join_pipeline, layer_shapes
from ckptflow.formats.deepspeed_ranks import mixed_saves
from ckptflow.formats.deepspeed_states import ModelStates
from ckptflow.formats.deepspeed_universal import read_universal
from ckptflow.formats.deepspeed_weights import Weights, read_weights
from ckptflow.formats.files import list_names
from ckptflow.formats.huggingface import TRAINER_DIRECTORY, TRAINER_STATE, unfinished_trainer_save
from ckptflow.formats.peft_config import CONFIG_NAME, adapter_spec
from ckptflow.formats.verdicts import refused
from ckptflow.formats.weight_sets import left_out_files
from ckptflow.formats.written_together import check_written_together
from ckptflow.manifest import CheckpointManifest, EqualSources, LeftOut, Mesh
from ckptflow.tensors import TensorSource

_LIGHTNING_KEY = "pytorch-lightning_version"


class DeepSpeedCheckpoint:
    """A tag folder, or the folder whose ``latest`` names it."""

    layout = "deepspeed"
    # Both hold 16-bit copies of what is here: the Trainer's model.safetensors, or its adapter.
    supersedes: tuple[str, ...] = ("huggingface", "peft")

    def find(self, path: Path) -> list[Location]:
        """See ``Format.find``. All tags are checkpoints; ``latest`` says which one is meant where nobody names one."""
        if is_tag_folder(path):
            return [Location(layout=self.layout, path=path, root=path)]
        tag = latest_tag(path)
        if tag is None:
            # The Trainer writes `latest` after the state files: without it, its model.safetensors is not all there is.
            tags = tag_folders(path) if TRAINER_DIRECTORY.match(path.name) else []
            return [Location(layout=self.layout, path=tags[0], root=path)] if len(tags) == 1 else []
        if is_plain_tag(tag) and is_tag_folder(path / tag):
            kind = _is_universal(path / tag)
            tags = [folder for folder in tag_folders(path) if _is_universal(folder) is kind]
            return [
                Location(layout=self.layout, path=folder, root=path, preferred=folder.name == tag) for folder in tags
            ]
        # `latest` names what is not there (any more, or yet): read and check say so.
        return [Location(layout=self.layout, path=path, root=path)] if tag_folders(path) else []

    def check(self, location: Location) -> Completeness:
        """See ``Format.check``: all files of all ranks parse, and their metadata fits together."""
        try:
            manifest = _describe(location, None)
        except CheckpointError as error:
            return refused(error, location.path)
        if unfinished_trainer_save(location.root):
            return Completeness(
                state="in-progress", reason=f"{TRAINER_STATE}, which the trainer writes last, is missing"
            )
        ranks = f"{manifest.world_size} rank" + ("s" if manifest.world_size > 1 else "")
        return Completeness(state="complete", reason=f"all files of {ranks} are there and whole")

    def read(self, location: Location, options: ReadOptions) -> CheckpointManifest:
        """See ``Format.read``."""
        root = location.root if location.root != location.path else location.path.parent
        config_dir = options.config_dir or find_config_dir(location.path, root)
        return _describe(location, config_dir)


def _is_universal(folder: Path) -> bool:
    return (folder / UNIVERSAL_FOLDER).is_dir()


def _describe(location: Location, config_dir: Path | None) -> CheckpointManifest:
    if not is_tag_folder(location.path):
        raise _no_such_tag(location.path)
    files = list_tag_files(location.path)
    if _is_universal(files.folder):
        ranks = [read_universal(files, location.root)]
        tensors, equal = ranks[0].tensors, ranks[0].equal
    else:
        layers = layer_shapes(files, location.root)
        ranks = [read_weights(files, mp, location.root, layers) for mp in _mp_ranks(files)]
        tensors, equal = _join(files, ranks, location.root)
        check_written_together({file.path: file for weights in ranks for file in weights.files}.values())
    extra = prove_by_copy_beside(location, tensors, {check.fqn for check in equal})
    adapter, adapter_notes = adapter_spec(tensors, location.root / CONFIG_NAME, location.root)
    model = ranks[0].model
    sources = {file.path: file for weights in ranks for file in weights.files} | {f.path: f for f in extra.files}
    step = model.number("global_steps")
    return CheckpointManifest(
        layout="deepspeed",
        path=location.path,
        global_step=location.global_step if step is None else step,
        world_size=ranks[0].dp_world_size * len(ranks),
        mesh=_mesh(model, ranks),
        tensors=tensors,
        ties={alias: owner for weights in ranks for alias, owner in weights.ties.items()},
        equal=(*equal, *extra.equal),
        left_out=(
            *_merged([entry for weights in ranks for entry in weights.left_out]),
            *extra.left_out,
            *_beside(location, [entry.name for entry in extra.left_out]),
        ),
        files=tuple(sources.values()),
        storage_bytes=sum(weights.storage_bytes for weights in ranks),
        wasted_bytes=sum(weights.wasted_bytes for weights in ranks),
        config_dir=config_dir,
        adapter=adapter,
        # Lightning gives DeepSpeed its own module, which holds the model under an attribute.
        wrapped=_LIGHTNING_KEY in model.client_keys,
        notes=(
            _stage_note(files, model),
            *_frozen_note(model),
            *(note for weights in ranks for note in weights.notes),
            *extra.notes,
            *adapter_notes,
            *_other_tags(location),
        ),
    )


def _beside(location: Location, known: Sequence[str]) -> list[LeftOut]:
    """What a trainer puts beside the tag folders."""
    if location.root == location.path:
        return []
    return left_out_files(list_names(location.root), known, location.root)


def _other_tags(location: Location) -> list[str]:
    others = [folder.name for folder in tag_folders(location.root) if folder != location.path]
    if location.root == location.path or not others:
        return []
    return [f"the folder holds other tags, which are checkpoints of their own: {', '.join(others[:8])}"]


def _no_such_tag(folder: Path) -> CheckpointError:
    tags = ", ".join(path.name for path in tag_folders(folder)) or "none"
    return IncompleteCheckpointError(
        "`latest` names a folder that is not a DeepSpeed checkpoint",
        file=folder,
        expected=f"a folder {latest_tag(folder)!r} with state files",
        found=f"tags here: {tags}",
        fix="name one of the tag folders, or wait until the save has finished",
    )


def _mp_ranks(files: TagFiles) -> list[int]:
    """All model-parallel ranks (pipeline stages among them), in order.

    Raises:
        IncompleteCheckpointError: some have no model file.
        InconsistentCheckpointError: some have optimizer states and no model states.
    """
    found = files.mp_ranks
    if missing := sorted(set(range(found[-1] + 1)) - set(found)):
        raise IncompleteCheckpointError(
            "the model states of model-parallel ranks are missing",
            file=files.folder,
            expected=f"mp ranks 0 to {found[-1]}",
            found=f"none of mp rank {', '.join(map(str, missing[:8]))}",
        )
    if foreign := sorted({mp for _, mp in files.optim} - set(found)):
        raise IncompleteCheckpointError(
            "optimizer states of model-parallel ranks that have no model states",
            file=files.folder,
            expected=f"mp ranks 0 to {found[-1]}",
            found=f"mp rank {', '.join(map(str, foreign[:8]))}",
        )
    return found


def _join(files: TagFiles, ranks: Sequence[Weights], root: Path) -> tuple[dict[str, TensorSource], list[EqualSources]]:
    equal = [check for weights in ranks for check in weights.equal]
    for weights in ranks:
        _check_same_save(ranks[0].model, weights.model)
        wanted = weights.model.number("mp_world_size") or 1
        if wanted > len(ranks) or (wanted < len(ranks) and not files.layers):
            kind = IncompleteCheckpointError if wanted > len(ranks) else InconsistentCheckpointError
            raise kind(
                "the number of model-parallel ranks is not the one that the files speak of",
                file=files.folder,
                expected=f"{wanted} (mp_world_size)",
                found=f"{len(ranks)}",
                fix="copy the files of all ranks of this save, and none of another one",
            )
    if files.layers or ranks[0].model.module is None:
        tensors, more = join_pipeline(files, ranks, root)
    elif len(ranks) > 1:
        tensors, more = join_tensor_parallel(ranks)
    else:
        tensors, more = ranks[0].tensors, []
    return tensors, [*equal, *more]


def _check_same_save(first: ModelStates, other: ModelStates) -> None:
    for key in ("global_steps", "global_samples", "dp_world_size"):
        expected, found = first.number(key), other.number(key)
        if None not in (expected, found) and found != expected:
            raise mixed_saves(key, other.file, expected, found)


def _mesh(model: ModelStates, ranks: Sequence[Weights]) -> Mesh | None:
    shape, names = [ranks[0].dp_world_size], ["dp"]
    if len(ranks) > 1:
        shape.append(len(ranks))
        names.append("pp" if model.module is None else "tp")
    return Mesh(shape=tuple(shape), dim_names=tuple(names))


def _merged(entries: Sequence[LeftOut]) -> list[LeftOut]:
    """One entry for each name and reason, with the bytes of all ranks."""
    merged: dict[tuple[str, str], int] = {}
    for entry in entries:
        key = (entry.name, entry.reason)
        merged[key] = merged.get(key, 0) + entry.nbytes
    return [LeftOut(name=name, reason=reason, nbytes=nbytes) for (name, reason), nbytes in merged.items()]


def _frozen_note(model: ModelStates) -> list[str]:
    """From stage 2 on, DeepSpeed lists the frozen parameters, if only as none, unless it was told to leave them out."""
    listed = "frozen_param_shapes" not in model.settings or model.settings["frozen_param_shapes"] is not None
    if listed or model.zero_config("stage") not in (2, 3) or model.settings.get("num_experts"):
        return []
    return ["saved with exclude_frozen_parameters: weights that were frozen, if any were, are not in this checkpoint"]


def _stage_note(files: TagFiles, model: ModelStates) -> str:
    stage = model.zero_config("stage")
    kind = "universal checkpoint" if (files.folder / UNIVERSAL_FOLDER).is_dir() else f"ZeRO stage {stage}"
    version = model.settings.get("ds_version")
    return f"DeepSpeed {version}, {kind}" if isinstance(version, str) else f"DeepSpeed, {kind}"
