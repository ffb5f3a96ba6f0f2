"""Which second reader goes with a checkpoint, and which tensors of a plan it can give."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING

from ckptflow.formats.config_files import read_config
from ckptflow.manifest import CheckpointManifest
from ckptflow.plan import PlannedTensor
from ckptflow.tensors import Shape
from ckptflow.transforms.code_bases.registry import recognise
from ckptflow.validate.reread import pieces
from ckptflow.validate.reread.base import Rereader, UncoveredError
from ckptflow.validate.reread.code_bases import CodeBaseRereader
from ckptflow.validate.reread.dcp import DcpRereader
from ckptflow.validate.reread.dcp_hf import DcpHuggingFaceRereader
from ckptflow.validate.reread.deepspeed import reread_deepspeed
from ckptflow.validate.reread.experts import ExpertsRereader, name_in_stack
from ckptflow.validate.reread.fsdp import RANK_FILE, FsdpRereader
from ckptflow.validate.reread.huggingface import HuggingFaceRereader
from ckptflow.validate.reread.megatron import reread_ranks, reread_torch_dist
from ckptflow.validate.reread.mxnet import MXNetRereader
from ckptflow.validate.reread.torch_file import TorchFileRereader

if TYPE_CHECKING:
    import torch


class SourceReader:
    """Reads the source of planned tensors: by a second reader where there is one, else by the manifest's pieces.

    Attributes:
        note: why there is no second reader, for people; None where there is one.
        independent: tensors that the second reader gave.
        by_manifest: tensors that came by the manifest's pieces.
    """

    def __init__(self, manifest: CheckpointManifest) -> None:
        self._manifest = manifest
        rereader, self.note = _open(manifest)
        self._rows = None if rereader is None else _rows_of_code_base(rereader, manifest)
        inner = self._rows or rereader
        self._rereader = None if inner is None else ExpertsRereader(inner)
        self.independent: set[str] = set()
        self.by_manifest: set[str] = set()

    @property
    def how(self) -> str:
        """How the source is read, for people."""
        ways = [self._rereader.how] if self._rereader is not None and self.independent else []
        if self.by_manifest:
            ways.append(f"{pieces.HOW} ({len(self.by_manifest)} tensors)" if ways else pieces.HOW)
        return " and ".join(ways)

    def name_for(self, tensor: PlannedTensor) -> str | None:
        """The second reader's name for the tensor; None where it is made of parts of others, or there is no reader."""
        if self._rereader is None:
            return None
        if self._rows is not None and tensor.fqn not in tensor.source_fqns:
            name = self._rows.name_for(tensor.source_fqns, tensor.fqn)
            return name if name is not None and self._rows.shape(name) == tensor.shape else None
        for fqn in tensor.source_fqns:
            if self._manifest.tensors.get(fqn) == tensor.source and self._rereader.shape(fqn) == tensor.shape:
                return fqn
        if len(tensor.source_fqns) == 1:
            name = name_in_stack(tensor.source_fqns[0], tensor.fqn)
            return name if name is not None and self._rereader.shape(name) == tensor.shape else None
        return None

    def read(self, tensor: PlannedTensor, name: str | None, offsets: Shape, sizes: Shape) -> torch.Tensor:
        """A box of the planned tensor in its source dtype; ``name`` is what ``name_for`` gave."""
        if name is not None and self._rereader is not None:
            self.independent.add(tensor.fqn)
            return self._rereader.read(name, offsets, sizes)
        self.by_manifest.add(tensor.fqn)
        return pieces.read_box(tensor.fqn, tensor.source, offsets, sizes)


def _rows_of_code_base(rereader: Rereader, manifest: CheckpointManifest) -> CodeBaseRereader | None:
    if manifest.config_dir is None or recognise(manifest.tensors) is None:
        return None
    return CodeBaseRereader(rereader, read_config(manifest.config_dir))


def _open(manifest: CheckpointManifest) -> tuple[Rereader | None, str | None]:
    files = [Path(file.path) for file in manifest.files]
    try:
        if manifest.layout == "fsdp":
            return FsdpRereader([path for path in files if RANK_FILE.search(path.name)]), None
        if manifest.layout in ("huggingface", "peft"):
            return HuggingFaceRereader(files), None
        if manifest.layout in ("lightning", "full-state-dict") and len(files) == 1:
            return TorchFileRereader(files[0]), None
        if manifest.layout == "dcp-hf":
            return DcpHuggingFaceRereader(files), None
        if manifest.layout == "mxnet":
            return MXNetRereader(files[0]), None
        if manifest.layout == "deepspeed":
            # The Trainer's 16-bit copy, which may be among the files, is no part of what is converted.
            states = [path for path in files if path.suffix != ".safetensors"]
            return reread_deepspeed(states, manifest.config_dir), None
        if manifest.layout in ("dcp", "megatron-dist"):
            by_name = {
                str(path.relative_to(manifest.path)): path for path in files if path.is_relative_to(manifest.path)
            }
            stored = DcpRereader(manifest.path, by_name)
            if manifest.layout == "dcp" or manifest.config_dir is None:
                return stored, None
            return reread_torch_dist(stored, read_config(manifest.config_dir)), None
        if manifest.layout == "megatron-legacy" and manifest.mesh is not None and manifest.config_dir is not None:
            return reread_ranks(files, manifest.mesh, read_config(manifest.config_dir)), None
    except UncoveredError as error:
        return None, f"no second reader for {error}"
    except (pickle.UnpicklingError, RuntimeError, TypeError, KeyError) as error:
        return None, f"torch does not load the source: {str(error)[:300]}"
    return None, f"no second reader for the layout {manifest.layout}"
