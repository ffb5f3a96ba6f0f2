"""The one door to pickle: torch files read as metadata, with nothing run and nothing imported."""

from ckptflow.torchfiles.lazy import LazyStorage, LazyTensor, MetaTensor
from ckptflow.torchfiles.reader import TorchFile, open_torch_file, read_pickle
from ckptflow.torchfiles.records import (
    DeviceMesh,
    DTensor,
    LocalShard,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardedTensor,
    ShardRegion,
    StridedShard,
    UnknownPlacement,
)
from ckptflow.torchfiles.stubs import Stub, stub_name, stub_state, unsupported_tensor_kind
from ckptflow.torchfiles.zipfiles import ZipArchive, ZipRecord

__all__ = [
    "DTensor",
    "DeviceMesh",
    "LazyStorage",
    "LazyTensor",
    "LocalShard",
    "MetaTensor",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "ShardRegion",
    "ShardedTensor",
    "StridedShard",
    "Stub",
    "TorchFile",
    "UnknownPlacement",
    "ZipArchive",
    "ZipRecord",
    "open_torch_file",
    "read_pickle",
    "stub_name",
    "stub_state",
    "unsupported_tensor_kind",
]
