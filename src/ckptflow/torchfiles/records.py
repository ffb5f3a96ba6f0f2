"""What torch.distributed saves, as plain records: meshes, placements, DTensor and ShardedTensor."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NoReturn

from ckptflow.torchfiles.lazy import LazyTensor, MetaTensor, Sealed


class _Record(Sealed):
    """A frozen record that a pickle can't change and that travels between processes by its fields."""

    __slots__ = ()

    def __reduce__(self) -> tuple[object, ...]:
        fields: dict[str, object] = getattr(self, "__dataclass_fields__")  # noqa: B009
        return (type(self), tuple(getattr(self, name) for name in fields))


def _sealed(self: Sealed, state: object) -> NoReturn:
    Sealed.__setstate__(self, state)


@dataclass(frozen=True, slots=True)
class Shard(_Record):
    """Split along ``dim``: chunk i of torch.chunk (the last ones may be shorter or empty) on mesh coordinate i."""

    dim: int
    __setstate__ = _sealed


@dataclass(frozen=True, slots=True)
class StridedShard(_Record):
    """torch's ``_StridedShard``: split along ``dim`` after a later mesh dim cut it into ``split_factor`` parts."""

    dim: int
    split_factor: int
    __setstate__ = _sealed


@dataclass(frozen=True, slots=True)
class Replicate(_Record):
    """The same values on each coordinate."""

    __setstate__ = _sealed


@dataclass(frozen=True, slots=True)
class Partial(_Record):
    """Summands (or another ``reduce_op``) that were never reduced."""

    reduce_op: str
    __setstate__ = _sealed


@dataclass(frozen=True, slots=True)
class UnknownPlacement(_Record):
    """A placement that ckptflow doesn't know; ``name`` is its class."""

    name: str
    __setstate__ = _sealed


Placement = Shard | StridedShard | Replicate | Partial | UnknownPlacement


@dataclass(frozen=True, slots=True)
class DeviceMesh(_Record):
    """A grid of ranks.

    Attributes:
        shape: sizes of the mesh dims.
        groups: flat rank lists in row-major order of ``shape``. One, except for a slice of a larger mesh in new
            torch files, which don't say which slice is meant: then all of them, and the rank decides.
        dim_names: names of the mesh dims, such as ``("fsdp", "tp")``; None where they have none.
        device_type: ``cuda``, ``cpu``…
        saved_coordinate: where the rank that saved the file stands on each mesh dim; None where it doesn't say.
    """

    shape: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    dim_names: tuple[str, ...] | None
    device_type: str
    saved_coordinate: tuple[int, ...] | None = None
    __setstate__ = _sealed

    def group_of(self, rank: int) -> tuple[int, ...] | None:
        """The flat rank list that holds ``rank``; None where the mesh doesn't hold it."""
        return next((group for group in self.groups if rank in group), None)

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """Position of ``rank`` along each mesh dim; None where the mesh doesn't hold it."""
        group = self.group_of(rank)
        if group is None:
            return None
        index = group.index(rank)
        sizes = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        return tuple(index // below % size for below, size in zip(sizes, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class DTensor(_Record):
    """One rank's part of a distributed tensor.

    Attributes:
        local: the rank's own values.
        shape: global shape, in elements.
        strides: global strides, in elements; None where the file doesn't say.
        dtype_name: torch's name.
        placements: one per mesh dim.
        shard_order: ``(tensor dim, mesh dims in order of cutting)`` where the file says it (new torch), else None.
    """

    local: LazyTensor | MetaTensor
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype_name: str
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shard_order: tuple[tuple[int, tuple[int, ...]], ...] | None = None
    requires_grad: bool = False
    is_parameter: bool = False
    __setstate__ = _sealed

    def as_parameter(self, *, requires_grad: bool) -> DTensor:
        """The same part as an ``nn.Parameter``."""
        return replace(self, requires_grad=requires_grad, is_parameter=True)


@dataclass(frozen=True, slots=True)
class ShardRegion(_Record):
    """Where a shard of a ShardedTensor lies in the global tensor, in elements, and who holds it (``rank:1/cpu``)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    placement: str
    __setstate__ = _sealed


@dataclass(frozen=True, slots=True)
class LocalShard(_Record):
    """A shard that this file holds."""

    tensor: LazyTensor
    region: ShardRegion
    __setstate__ = _sealed


@dataclass(frozen=True, slots=True)
class ShardedTensor(_Record):
    """FSDP1's older way: the file's own shards, and the regions of all shards of all ranks.

    Attributes:
        shape: global shape, in elements.
    """

    shape: tuple[int, ...]
    dtype_name: str
    local_shards: tuple[LocalShard, ...]
    all_regions: tuple[ShardRegion, ...]
    requires_grad: bool = False
    __setstate__ = _sealed
