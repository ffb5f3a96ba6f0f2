"""Megatron-Core's ``torch_dist`` checkpoints: a DCP directory whose tensors bear Megatron's names.

verl writes ``actor/dist_ckpt/`` with ``huggingface/`` beside it, or both in ``actor/model/``, and optimizer and random
state apart; Megatron-LM ``iter_0000010/``, NeMo 2 ``weights/``.
Layers, and experts in them, are stacked: axis 0 is the global layer number. Pipeline and tensor parallelism leave no
trace in global tensors (https://github.com/NVIDIA/Megatron-LM/tree/main/megatron/core/dist_checkpointing).
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptflow.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    InconsistentCheckpointError,
    UnsupportedCheckpointError,
)
from ckptflow.files.jsonfiles import read_json_object
from ckptflow.formats.base import Completeness, Location, ReadOptions
from ckptflow.formats.config_files import find_config_dir, needed_config_dir, read_config
from ckptflow.formats.dcp import is_dcp, stray_files, world_size
from ckptflow.formats.dcp_checks import check_files, check_one_save, completeness, read_metadata
from ckptflow.formats.dcp_metadata import DcpMetadata
from ckptflow.formats.dcp_records import DcpFiles
from ckptflow.formats.files import checked_file, list_names
from ckptflow.formats.megatron_args import WHY_CONFIG, Grid, file_args
from ckptflow.formats.peft_config import CONFIG_NAME as PEFT_CONFIG
from ckptflow.formats.run_tracker import TRUSTED_SECONDS
from ckptflow.formats.state_names import MEGATRON_DIRECTORY, is_state_directory
from ckptflow.formats.verdicts import newest_mtime, refused
from ckptflow.manifest import CheckpointManifest, LeftOut, Mesh
from ckptflow.tensors import TensorSource, concatenate, unbind
from ckptflow.transforms.fqn import DDP_PREFIX
from ckptflow.transforms.megatron_args import check_args
from ckptflow.transforms.megatron_names import NO_WEIGHTS, describe, to_huggingface

DIRECTORY = MEGATRON_DIRECTORY
MODEL_PART = "model"
# verl's list of what is in such parts.
CONTENTS = "ckpt_contents.json"
BACKEND = "metadata.json"
COMMON = "common.pt"
# Newer versions save the same as one object among the others of the DCP directory.
COMMON_OBJECT = re.compile(r"common_state/shard_0_1")
TRANSFORMER_CONFIG = "transformer_config.json"
STEP_DIRECTORY = re.compile(r"global_step_?\d+$")
STATE = re.compile(
    r"(chained_\d+\.)?(optimizer|opt_param_scheduler|rng_state|rerun_state_machine_state|lr_scheduler)\b"
)
STACKED = re.compile(r"decoder\.layers\.(?P<rest>(?!\d+\.).+)")
LAYER = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
EXPERTS = re.compile(r"mlp\.experts\.experts\.(?P<rest>(?!\d+\.).+)")
EXPERT = re.compile(r"mlp\.experts\.experts\.(?P<expert>\d+)\.(?P<rest>.+)")
ADAPTER = re.compile(r"\.adapter\.linear_(?:in|out)\.")


class MegatronDistCheckpoint:
    """A directory that ``megatron.core.dist_checkpointing`` wrote."""

    layout = "megatron-dist"
    supersedes: tuple[str, ...] = ("dcp",)

    def find(self, path: Path) -> list[Location]:
        """The directory itself, or verl's ``dist_ckpt`` in it."""
        for directory in (path, path / DIRECTORY):
            if _is_megatron(directory) and not is_state_directory(directory):
                is_verl = directory.name == DIRECTORY
                root = _root_of(directory)
                role = root.name if is_verl and STEP_DIRECTORY.search(root.parent.name) else None
                return [Location(layout=self.layout, path=directory, root=root, role=role)]
        return []

    def check(self, location: Location) -> Completeness:
        """As for DCP, and Megatron's own two files; ``metadata.json`` is written after everything else."""
        names = list_names(location.path)
        if BACKEND not in names:
            return Completeness(state="in-progress", reason="metadata.json, which is written last, is not there yet")
        try:
            _check_backend(location.path)
        except CheckpointError as error:
            return refused(error, location.path)

        def holds_args(metadata: DcpMetadata) -> None:
            _args(metadata, location.path, location.root)

        verdict = completeness(location.path, location.root, holds_args)
        if verdict.state == "complete" and _lacks_contents(location):
            return Completeness(state="in-progress", reason=f"{CONTENTS}, which verl writes last, is not there yet")
        return verdict

    def read(self, location: Location, options: ReadOptions) -> CheckpointManifest:
        """The model under transformers' names, as windows on Megatron's tensors."""
        directory, root = location.path, location.root
        _check_backend(directory)
        metadata = read_metadata(directory, root)
        check_files(metadata, directory, root)
        check_one_save(metadata, directory, DcpFiles(directory, root))
        config = read_config(needed_config_dir(directory, root, options, WHY_CONFIG))
        files = DcpFiles(directory, root)
        _check_no_adapter(metadata, directory, root)
        tree = _tree(metadata, files, directory)
        output = tree.get("output_layer.weight")
        model = describe(config, output.shape[0] if output and output.shape else None)
        args, origin = _args(metadata, directory, root)
        check_args(args, model, origin)
        result = to_huggingface(tree, model)
        return CheckpointManifest(
            layout=self.layout,
            path=directory,
            global_step=location.global_step,
            world_size=world_size(metadata),
            mesh=_mesh(args),
            tensors=result.tensors,
            ties=result.ties,
            equal=result.equal,
            left_out=(*result.left_out, *_state(metadata), *stray_files(metadata, directory)),
            files=files.used,
            storage_bytes=files.storage_bytes,
            wasted_bytes=files.wasted_bytes,
            config_dir=options.config_dir or find_config_dir(directory, root),
            notes=(
                "names are transformers'; the tensors are windows on Megatron's, which stack layers and fuse q, k, v "
                "and gate, up",
                *result.notes,
            ),
        )


def _is_megatron(directory: Path) -> bool:
    names = list_names(directory)
    if (directory.name == DIRECTORY or COMMON in names) and is_dcp(directory):
        return True  # whatever metadata.json says: a damaged one must not make it plain DCP
    if BACKEND not in names:
        return False
    try:
        return "sharded_backend" in read_json_object(directory / BACKEND, max_bytes=10**5)
    except (CheckpointError, OSError):
        return False


def _check_backend(directory: Path) -> None:
    try:
        backend = read_json_object(directory / BACKEND).get("sharded_backend")
    except IncompleteCheckpointError as error:
        raise IncompleteCheckpointError(
            "the checkpoint has no metadata.json, which Megatron writes last",
            file=directory,
            fix="wait until the save is done; one that was killed can't be read, nor can --ckpt-format torch_dcp and "
            "fsdp_dtensor, which write none: let Megatron save it with torch_dist",
        ) from error
    if backend != "torch_dist":
        raise UnsupportedCheckpointError(
            "a Megatron checkpoint of another backend",
            file=directory / BACKEND,
            expected="torch_dist",
            found=backend,
            fix="let Megatron load it and save it with --ckpt-format torch_dist",
        )


def _root_of(directory: Path) -> Path:
    """The directory of the role, ``actor``, where verl wrote; otherwise the checkpoint's own."""
    if directory.name != DIRECTORY:
        return directory
    part = directory.parent
    role = part.parent
    in_parts = STEP_DIRECTORY.search(role.parent.name) or (role / TRANSFORMER_CONFIG).is_file()
    return role if part.name == MODEL_PART and in_parts else part


def _lacks_contents(location: Location) -> bool:
    """Whether a save in parts has no list of them yet: config and tokenizer may not be there either."""
    in_parts = location.path.parent.parent == location.root and location.path.parent.name == MODEL_PART
    if not in_parts or (location.root / CONTENTS).exists():
        return False
    return time.time() - newest_mtime(location.path) < TRUSTED_SECONDS


def _args(metadata: DcpMetadata, directory: Path, root: Path) -> tuple[Mapping[str, Any], str]:
    """What Megatron recorded about the model: its args, or verl's transformer_config.json."""
    verl = root / TRANSFORMER_CONFIG
    if directory.name == DIRECTORY and verl.exists():
        checked_file(verl, root)
        return read_json_object(verl), str(verl)
    return _common_args(metadata, directory, root)


def _common_args(metadata: DcpMetadata, directory: Path, root: Path) -> tuple[Mapping[str, Any], str]:
    """``args`` among what all ranks have in common, in common.pt or in the DCP directory, and the file with them.

    Raises:
        IncompleteCheckpointError: it is in neither.
    """
    record = next((blob for key, blob in metadata.blobs.items() if COMMON_OBJECT.fullmatch(key)), None)
    if record is not None:
        file = checked_file(directory / record.file_name, root)
        return file_args(file.path, offset=record.offset_bytes, length=record.nbytes), file.path
    common = checked_file(directory / COMMON, root)
    return file_args(common.path), common.path


def _check_no_adapter(metadata: DcpMetadata, directory: Path, root: Path) -> None:
    """LoRA in Megatron's names, mostly without the base model; verl exports it beside, in PEFT's names."""
    found = next((key for key in metadata.tensors if ADAPTER.search(key)), None)
    if found is None:
        return
    exported = next((path.parent for path in sorted(root.rglob(PEFT_CONFIG))), None)
    raise UnsupportedCheckpointError(
        "an adapter in Megatron's names",
        file=directory,
        tensor=found,
        fix=f"name the same adapter in PEFT's names: {exported}"
        if exported
        else "let Megatron-Bridge export the adapter, or the model with it, to Hugging Face's names",
    )


def _mesh(args: Mapping[str, Any]) -> Mesh | None:
    tp, pp = args.get("tensor_model_parallel_size"), args.get("pipeline_model_parallel_size")
    ep = args.get("expert_model_parallel_size")
    if not isinstance(tp, int) or not isinstance(pp, int):
        return None
    return Grid(tp=tp, pp=pp, ep=ep if isinstance(ep, int) else 1).mesh


def _tree(metadata: DcpMetadata, files: DcpFiles, directory: Path) -> dict[str, TensorSource]:
    """Megatron's names with layer and expert numbers → tensors without those axes."""
    tree: dict[str, TensorSource] = {}
    keys = [key for key in metadata.tensors if not STATE.match(key)]
    # NeMo saves the model inside its wrapper.
    wrapper = DDP_PREFIX if all(key.startswith(DDP_PREFIX) for key in keys) else ""
    for key in keys:
        for name, source in _unstacked(key.removeprefix(wrapper), files.source(key, metadata.tensors[key])):
            if name in tree:
                raise InconsistentCheckpointError(
                    "two tensors for one parameter", file=directory, tensor=name, found=key
                )
            tree[name] = source
    return _with_joined_halves(tree)


def _unstacked(key: str, source: TensorSource) -> list[tuple[str, TensorSource]]:
    stacked, layer = STACKED.fullmatch(key), LAYER.fullmatch(key)
    if stacked and source.shape and not NO_WEIGHTS.search(key):
        layers = enumerate(unbind(source))
        return [pair for i, one in layers for pair in _experts(f"decoder.layers.{i}.", stacked["rest"], one)]
    if layer:
        return _experts(f"decoder.layers.{int(layer['layer'])}.", layer["rest"], source)
    return [(key, source)]


def _experts(prefix: str, rest: str, source: TensorSource) -> list[tuple[str, TensorSource]]:
    """Experts by number: stacked on the next axis, or numbered in the name (``singleton_local_shards``)."""
    stacked, numbered = EXPERTS.fullmatch(rest), EXPERT.fullmatch(rest)
    if stacked and source.shape:
        experts = enumerate(unbind(source))
        return [(f"{prefix}mlp.experts.local_experts.{e}.{stacked['rest']}", one) for e, one in experts]
    if numbered:
        return [(f"{prefix}mlp.experts.local_experts.{int(numbered['expert'])}.{numbered['rest']}", source)]
    return [(prefix + rest, source)]


def _with_joined_halves(tree: dict[str, TensorSource]) -> dict[str, TensorSource]:
    """``singleton_local_shards`` saves gate and up of ``linear_fc1`` as ``weight_w`` and ``weight_v``."""
    joined = dict(tree)
    for name in tree:
        if name.endswith("linear_fc1.weight_w") and f"{name[:-1]}v" in tree:
            whole = concatenate([joined.pop(name), joined.pop(f"{name[:-1]}v")], 0)
            joined[name.removesuffix("_w")] = whole
    return joined


def _state(metadata: DcpMetadata) -> list[LeftOut]:
    """Optimizer, random state and modules' extra state, one entry per kind."""
    sizes: dict[str, list[int]] = {}
    for key, tensor in metadata.tensors.items():
        match = STATE.match(key)
        if match:
            sizes.setdefault(match.group(2), []).append(tensor.record_bytes)
    for key, record in metadata.blobs.items():
        match = STATE.match(key)
        kind = match.group(2) if match else "_extra_state" if "_extra_state" in key else key
        sizes.setdefault(kind, []).append(record.nbytes)
    return [
        LeftOut(name=f"{kind}.*" if len(all_of) > 1 else kind, reason=_reason(kind, len(all_of)), nbytes=sum(all_of))
        for kind, all_of in sizes.items()
    ]


def _reason(kind: str, count: int) -> str:
    what = {"_extra_state": "modules' extra state, no weights", "rng_state": "random number generator state"}.get(kind)
    return (what or "training state") + (f" ({count} entries)" if count > 1 else "")
