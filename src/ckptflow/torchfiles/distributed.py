"""Turns the stubs of torch.distributed's objects into records.

The class paths differ between torch 2.1 and 2.13, the class names and fields hardly do, so that classes are known by
their name under ``torch.distributed``. Read from torch/distributed/device_mesh.py, _mesh_layout.py,
tensor/_dtensor_spec.py and _shard/sharded_tensor/api.py of 2.1, 2.4, 2.6 and 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Final

from ckptflow.errors import CorruptFileError, UnsupportedCheckpointError
from ckptflow.torchfiles.budget import Budget
from ckptflow.torchfiles.dtypes import TorchDtype
from ckptflow.torchfiles.lazy import LazyTensor, MetaTensor
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
from ckptflow.torchfiles.stubs import Stub, merged_state, stub_name, stub_state

MAX_RANKS: Final = 2**20

IntReader = Callable[[LazyTensor], tuple[int, ...]]


class RecordBuilder:
    """Builds the records of one file.

    Args:
        path: the file, for messages.
        read_ints: reads the values of a small integer tensor (the ranks of a mesh).
        budget: bounds the copies that records make.
    """

    def __init__(self, path: str, read_ints: IntReader, budget: Budget) -> None:
        self._budget = budget
        self._path = path
        self._read_ints = read_ints
        # Meshes and specs are shared by all tensors of a file. The stub is kept so that its id stays its own.
        self._meshes: dict[int, tuple[Stub, DeviceMesh]] = {}
        self._placements: dict[int, tuple[Stub, Placement]] = {}

    def dtensor(self, state: object, requires_grad: bool) -> DTensor:
        """A DTensor from the state that torch restores it with."""
        fields = merged_state(state)
        local, spec = fields.get("_local_tensor"), stub_state(fields.get("_spec"))
        if isinstance(local, Stub) and any(isinstance(v, LazyTensor) for v in merged_state(local.state).values()):
            raise UnsupportedCheckpointError(
                "the bytes of a tensor are not its values",
                file=self._path,
                found=f"DTensors of {stub_name(local)}",
                fix="save it as a plain tensor",
            )
        if not isinstance(local, LazyTensor | MetaTensor):
            raise self._corrupt("a DTensor has no plain local tensor", found=stub_name(local))
        meta = stub_state(spec.get("tensor_meta")) or _named_fields(spec.get("tensor_meta"))
        shape = self._ints(meta.get("shape"), "shape of a DTensor")
        strides = meta.get("stride")
        placements = spec.get("placements")
        if not isinstance(placements, tuple | list):
            raise self._corrupt("a DTensor has no placements", found=placements)
        self._budget.spend(len(placements))
        mesh = self.mesh(spec.get("mesh"))
        if len(placements) != len(mesh.shape):
            raise self._corrupt("a DTensor has another number of placements than of mesh dims", found=placements)
        return DTensor(
            local=local,
            shape=shape,
            strides=None if strides is None else self._ints(strides, "strides of a DTensor"),
            dtype_name=self._dtype_name(meta.get("dtype")),
            mesh=mesh,
            placements=tuple(self._placement(item) for item in placements),
            shard_order=self._shard_order(spec),
            requires_grad=requires_grad,
        )

    def mesh(self, stub: object) -> DeviceMesh:
        """A DeviceMesh, whether the file keeps a tensor of ranks (up to torch 2.8) or layouts on a list of them."""
        if not isinstance(stub, Stub):
            raise self._corrupt("a DTensor has no device mesh", found=stub_name(stub))
        known = self._meshes.get(id(stub))
        if known is not None:
            return known[1]
        state = stub_state(stub)
        ranks = state.get("mesh", state.get("_mesh"))
        if isinstance(ranks, LazyTensor):
            self._budget.spend(ranks.numel)
            shape = ranks.shape
            groups: tuple[tuple[int, ...], ...] = (self._read_ints(ranks),)
        else:
            shape, groups = self._mesh_from_layout(state)
        names = state.get("mesh_dim_names", state.get("_mesh_dim_names"))
        if names is not None and not (isinstance(names, tuple | list) and len(names) == len(shape)):
            raise self._corrupt("a device mesh has another number of names than of dims", found=names)
        mesh = DeviceMesh(
            shape=shape,
            groups=groups,
            dim_names=None if names is None else tuple(str(item) for item in names),
            device_type=str(state.get("device_type", state.get("_device_type", ""))),
            saved_coordinate=self._saved_coordinate(state, shape),
        )
        self._meshes[id(stub)] = (stub, mesh)
        return mesh

    def _saved_coordinate(self, state: dict[str, object], shape: tuple[int, ...]) -> tuple[int, ...] | None:
        saved = state.get("_coordinate_on_dim")
        if saved is None:  # a rank outside the mesh, or a file that doesn't say
            return None
        coordinate = self._ints(saved, "coordinate on a device mesh")
        if len(coordinate) != len(shape):
            raise self._corrupt("a coordinate has another number of dims than its device mesh", found=coordinate)
        return coordinate

    def _mesh_from_layout(self, state: dict[str, object]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        axes = self._layout_axes(state.get("_layout"))
        rank_map = state.get("_flatten_rank_map")
        if rank_map is None:
            rank_map = state.get("_rank_map")
        if isinstance(rank_map, LazyTensor):
            self._budget.spend(rank_map.numel)
            ranks = self._read_ints(rank_map)
        else:
            ranks = self._ints(rank_map, "ranks of a mesh")
        shape = tuple(math.prod(size for size, _ in axis) for axis in axes)
        if math.prod(shape) > len(ranks) or len(ranks) > MAX_RANKS:
            raise self._corrupt("a device mesh is larger than its list of ranks", expected=shape, found=len(ranks))
        flat = [pair for axis in axes for pair in axis]
        steps = [range(0, size * stride, stride) if stride else range(size) for size, stride in flat]
        if any(stride == 0 and size > 1 for size, stride in flat):
            raise self._corrupt("a device mesh names ranks twice")
        pattern = [sum(place) for place in product(*steps)]
        return shape, self._tile(pattern, ranks)

    def _tile(self, pattern: list[int], ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """All shifts of ``pattern`` that together name each rank once (torch: _MeshLayout.remap_to_tensor)."""
        taken = [False] * len(ranks)
        groups = []
        for first in range(len(ranks)):
            if taken[first]:
                continue
            places = [first + step for step in pattern]
            if max(places) >= len(ranks) or any(taken[place] for place in places) or len(set(places)) != len(places):
                raise self._corrupt("the layout of a device mesh doesn't fit its ranks", found=f"{len(ranks)} ranks")
            for place in places:
                taken[place] = True
            groups.append(tuple(ranks[place] for place in places))
        return tuple(groups)

    def _layout_axes(self, stub: object) -> list[list[tuple[int, int]]]:
        """Per mesh dim its (size, stride) pairs; ``_MeshLayout`` has axes in 2.13, nested shape and stride before."""
        state = stub_state(stub)
        axes = state.get("axes")
        if isinstance(axes, tuple | list):
            return [self._pairs(stub_state(axis).get("shape"), stub_state(axis).get("stride")) for axis in axes]
        shape, stride = state.get("shape"), state.get("stride")
        if isinstance(shape, int) and isinstance(stride, int):
            return [[(shape, stride)]]
        if not isinstance(shape, tuple) or not isinstance(stride, tuple) or len(shape) != len(stride):
            raise self._corrupt("a device mesh has neither ranks nor a layout", found=stub_name(stub))
        return [self._pairs(size, step) for size, step in zip(shape, stride, strict=True)]

    def _pairs(self, shape: object, stride: object) -> list[tuple[int, int]]:
        sizes = self._ints((shape,) if isinstance(shape, int) else shape, "layout of a mesh")
        steps = self._ints((stride,) if isinstance(stride, int) else stride, "layout of a mesh")
        if len(sizes) != len(steps) or any(size < 1 or size > MAX_RANKS for size in sizes):
            raise self._corrupt("the layout of a device mesh is damaged", found=(sizes, steps))
        return list(zip(sizes, steps, strict=True))

    def _placement(self, stub: object) -> Placement:
        if not isinstance(stub, Stub):
            raise self._corrupt("a DTensor has a placement of an unknown kind", found=stub_name(stub))
        known = self._placements.get(id(stub))
        if known is None:
            known = self._placements[id(stub)] = (stub, self._new_placement(stub))
        return known[1]

    def _new_placement(self, stub: Stub) -> Placement:
        state, kind = stub_state(stub), stub.stub_name.rpartition(".")[2]
        first = state.get("dim", stub.args[0] if stub.args else None)
        if not stub.stub_module.startswith("torch.distributed"):
            return UnknownPlacement(stub_name(stub))
        if kind == "Replicate":
            return Replicate()
        if kind == "Shard":
            return Shard(self._count(first, "dim of a placement"))
        if kind == "_StridedShard":
            factor = state.get("split_factor", stub.kwargs.get("split_factor", stub.args[1] if stub.args[1:] else None))
            return StridedShard(self._count(first, "dim of a placement"), self._count(factor, "split factor"))
        if kind in ("Partial", "_Partial"):
            return Partial(str(state.get("reduce_op", stub.args[0] if stub.args else "sum")))
        return UnknownPlacement(stub_name(stub))

    def _shard_order(self, spec: dict[str, object]) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
        order = spec.get("shard_order", spec.get("_shard_order"))
        if not isinstance(order, tuple | list):
            return None
        entries = [stub_state(item) or _named_fields(item) for item in order]
        return tuple(
            (self._count(item.get("tensor_dim"), "shard order"), self._ints(item.get("mesh_dims"), "shard order"))
            for item in entries
        )

    def sharded_tensor(self, state: object, requires_grad: bool) -> ShardedTensor:
        """A ShardedTensor from its state: local shards, metadata, process group, sharding spec, RRefs."""
        if not isinstance(state, tuple) or len(state) < 2 or not isinstance(state[0], list | tuple):
            raise self._corrupt("a ShardedTensor has no shards", found=stub_name(state))
        metadata = stub_state(state[1])
        regions = metadata.get("shards_metadata")
        properties = metadata.get("tensor_properties")
        saved = properties.state if isinstance(properties, Stub) else None
        dtype = saved[0] if isinstance(saved, tuple) and saved else stub_state(properties).get("dtype")
        return ShardedTensor(
            shape=self._ints(metadata.get("size"), "size of a ShardedTensor"),
            dtype_name=self._dtype_name(dtype),
            local_shards=tuple(self._local_shard(item) for item in state[0]),
            all_regions=tuple(self._region(item) for item in regions) if isinstance(regions, list | tuple) else (),
            requires_grad=requires_grad,
        )

    def _local_shard(self, stub: object) -> LocalShard:
        state = stub_state(stub)
        tensor = state.get("tensor")
        if not isinstance(tensor, LazyTensor):
            raise self._corrupt("a shard of a ShardedTensor has no plain tensor", found=stub_name(tensor))
        return LocalShard(tensor, self._region(state.get("metadata")))

    def _region(self, stub: object) -> ShardRegion:
        state = stub_state(stub)
        return ShardRegion(
            self._ints(state.get("shard_offsets"), "offsets of a shard"),
            self._ints(state.get("shard_sizes"), "sizes of a shard"),
            _remote_device(state.get("placement")),
        )

    def _dtype_name(self, dtype: object) -> str:
        if not isinstance(dtype, TorchDtype):
            raise self._corrupt("a distributed tensor has no dtype", found=stub_name(dtype))
        return dtype.name

    def _ints(self, values: object, what: str) -> tuple[int, ...]:
        if not isinstance(values, tuple | list):
            raise self._corrupt(f"the {what} is missing", found=stub_name(values))
        self._budget.spend(len(values))
        return tuple(self._count(value, what) for value in values)

    def _count(self, value: object, what: str) -> int:
        if type(value) is not int or value < 0:
            raise self._corrupt(f"the {what} holds something else than counts", found=value)
        return value

    def _corrupt(self, what: str, *, expected: object = None, found: object = None) -> CorruptFileError:
        # Rendered now, while errors in odd objects still count as damage, and never at full length.
        return CorruptFileError(what, file=self._path, expected=expected, found=str(found)[:200])


def _named_fields(value: object) -> dict[str, object]:
    """Fields of a NamedTuple: its stub holds them as arguments (ShardOrderEntry, TensorMeta, TensorMetadata)."""
    if not isinstance(value, Stub):
        return {}
    names = {
        "TensorMeta": ("shape", "stride", "dtype"),
        "TensorMetadata": ("shape", "dtype", "requires_grad", "stride"),
        "ShardOrderEntry": ("tensor_dim", "mesh_dims"),
    }.get(value.stub_name, ())
    return dict(zip(names, value.args, strict=False))


def _remote_device(stub: object) -> str:
    """``rank:1/cuda:1`` or ``worker/cpu``, as torch prints a ``_remote_device``."""
    state = stub_state(stub)
    rank, worker, device = state.get("_rank"), state.get("_worker_name"), state.get("_device", "")
    if rank is not None:
        return f"rank:{rank}/{device}"
    return f"{worker}/{device}" if worker is not None else str(device)
