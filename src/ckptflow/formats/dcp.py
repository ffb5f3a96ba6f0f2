"""Torch Distributed Checkpoint directories: ``.metadata`` and ``.distcp`` files, from whatever trainer wrote them.

FSDP1 and FSDP2, HSDP, 2-D meshes, one or many files per rank, torchtitan's ``step-N`` and Accelerate's
``pytorch_model_fsdp_N``: the metadata says where each chunk lies, so that the way it was sharded doesn't matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ckptflow.errors import IncompleteCheckpointError
from ckptflow.files.kinds import kind_of_directory
from ckptflow.formats.base import Completeness, Location, ReadOptions
from ckptflow.formats.config_files import directory_names, find_config_dir
from ckptflow.formats.dcp_checks import (
    DATA_SUFFIX,
    METADATA,
    PARTIAL_METADATA,
    check_files,
    check_one_save,
    completeness,
    read_metadata,
)
from ckptflow.formats.dcp_metadata import DcpMetadata
from ckptflow.formats.dcp_records import DcpFiles
from ckptflow.formats.dcp_subtree import find_model
from ckptflow.formats.files import list_names
from ckptflow.formats.peft_config import adapter_spec
from ckptflow.formats.state_names import is_state_directory
from ckptflow.manifest import CheckpointManifest, LeftOut
from ckptflow.transforms.prefix import share_first_part

# Accelerate and the HF Trainer: https://github.com/huggingface/accelerate (utils/fsdp_utils.py, save_fsdp_model).
ACCELERATE_MODEL = re.compile(r"pytorch_model_fsdp_\d+")
ACCELERATE_STATE = re.compile(r"random_states_\d+\.pkl|rng_state(_\d+)?\.pth|(scheduler|optimizer|scaler)\.(bin|pt)")
PLAIN_EMBEDDING = re.compile(r"[^.]+\.(embed_tokens|wte)\.weight")
RANK_FILE = re.compile(r"__(\d+)_\d+\.distcp")
MEGATRONS = re.compile(r"(.+\.)?decoder\.layers\.(\d+\.)?(self_attention|mlp)\..*linear_(qkv|q_down_proj|fc1)\.weight")


class DcpDirectory:
    """A directory that ``torch.distributed.checkpoint`` wrote with its file system writer."""

    layout = "dcp"
    supersedes: tuple[str, ...] = ("peft",)

    def find(self, path: Path) -> list[Location]:
        """The directory itself, or the model directories of an Accelerate checkpoint in it."""
        if ACCELERATE_MODEL.fullmatch(path.name) and is_dcp(path):
            return [Location(layout=self.layout, path=path, root=path.parent)]
        if is_state_directory(path):
            return []
        if is_dcp(path):
            return [Location(layout=self.layout, path=path, root=path)]
        models = [path / name for name in directory_names(path) if ACCELERATE_MODEL.fullmatch(name)]
        return [Location(layout=self.layout, path=model, root=path) for model in models if is_dcp(model)]

    def check(self, location: Location) -> Completeness:
        """``.metadata`` is written last; each file must be as long as its last entry says; a model must be in it."""

        def holds_model(metadata: DcpMetadata) -> None:
            _check_not_megatrons(find_model(metadata, str(location.path)).fqns, location.path)

        return completeness(location.path, location.root, holds_model)

    def read(self, location: Location, options: ReadOptions) -> CheckpointManifest:
        """All tensors of the model; optimizer entries are not read, but for a few step counters that are compared."""
        directory, root = location.path, location.root
        metadata = read_metadata(directory, root)
        check_files(metadata, directory, root)
        model = find_model(metadata, str(directory))
        counters = DcpFiles(directory, root)
        check_one_save(metadata, directory, counters)
        files = DcpFiles(directory, root)
        _check_not_megatrons(model.fqns, directory)
        tensors = {fqn: files.source(fqn, metadata.tensors[key]) for fqn, key in model.fqns.items()}
        adapter, adapter_notes = adapter_spec(tensors, _adapter_config(directory), root)
        where = f"the dict {'.'.join(map(str, model.root))}" if model.root else "the top level"
        return CheckpointManifest(
            layout=self.layout,
            path=directory,
            global_step=location.global_step,
            world_size=world_size(metadata),
            tensors=tensors,
            left_out=(*model.left_out, *stray_files(metadata, directory), *_accelerate_state(directory)),
            files=files.used,
            storage_bytes=files.storage_bytes,
            wasted_bytes=files.wasted_bytes,
            config_dir=options.config_dir or find_config_dir(directory, root),
            adapter=adapter,
            wrapped=adapter is None and may_be_wrapped(tensors),
            notes=(f"the model is {where} of the saved state dict", *adapter_notes),
        )


def _check_not_megatrons(fqns: Iterable[str], directory: Path) -> None:
    """Megatron's tensors under their own names load nowhere: q, k, v are fused and layers stacked."""
    found = next((fqn for fqn in fqns if MEGATRONS.fullmatch(fqn)), None)
    if found is not None:
        raise IncompleteCheckpointError(
            "a Megatron checkpoint without the files that say so",
            file=directory,
            tensor=found,
            expected="metadata.json with sharded_backend, and common.pt where older versions saved",
            found=", ".join(list_names(directory)[:8]),
            fix="copy them from where it was saved; --ckpt-format torch_dcp and fsdp_dtensor write none: let Megatron "
            "save it with torch_dist",
        )


def may_be_wrapped(fqns: Iterable[str]) -> bool:
    """Whether all names may stand behind one attribute of a wrapper, such as Lightning's ``model.``.

    transformers' models with a head have names with two first parts; ones whose tied head was left out have one, which
    holds the embedding itself. Names without a dot are of no module: a counter beside the model (``n_averaged``).
    """
    names = [name for name in fqns if "." in name]
    return share_first_part(names) and not any(PLAIN_EMBEDDING.fullmatch(name) for name in names)


def _adapter_config(directory: Path) -> Path:
    found = [directory / "lora_adapter", directory, directory.parent]
    names = [place / "adapter_config.json" for place in found]
    return next((name for name in names if name.is_file()), names[0])


def is_dcp(path: Path) -> bool:
    """Whether a directory holds a DCP save, finished or not."""
    names = list_names(path)
    return any(name in (METADATA, PARTIAL_METADATA) or name.endswith(DATA_SUFFIX) for name in names)


def world_size(metadata: DcpMetadata) -> int:
    """Ranks that wrote data; ranks without any leave no trace."""
    matches = [RANK_FILE.fullmatch(name) for name in metadata.file_ends]
    return max((int(match.group(1)) + 1 for match in matches if match), default=1)


def stray_files(metadata: DcpMetadata, directory: Path) -> list[LeftOut]:
    """Data files that ``.metadata`` doesn't name."""
    strays = []
    for name in list_names(directory):
        if name in metadata.file_ends or not name.endswith(DATA_SUFFIX):
            continue
        nbytes = file_size(directory / name)
        reason = "an empty data file: its rank wrote nothing, since other ranks had saved the same names"
        strays.append(
            LeftOut(name=name, reason="not named by .metadata: of another save" if nbytes else reason, nbytes=nbytes)
        )
    return strays


def file_size(path: Path) -> int:
    """Bytes of a file; 0 if it has just vanished."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _accelerate_state(directory: Path) -> list[LeftOut]:
    """What Accelerate puts beside the model directory."""
    if not ACCELERATE_MODEL.fullmatch(directory.name):
        return []
    parent = directory.parent
    found = [
        LeftOut(name=name, reason="training state", nbytes=file_size(parent / name))
        for name in list_names(parent)
        if ACCELERATE_STATE.fullmatch(name)
    ]
    for name in directory_names(parent):
        if kind_of_directory(name) == "optimizer":
            nbytes = sum(file_size(parent / name / inner) for inner in list_names(parent / name))
            found.append(LeftOut(name=f"{name}/", reason="optimizer state", nbytes=nbytes))
    return found
