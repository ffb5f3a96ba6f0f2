"""Collects what each rank's file says about each tensor, and refuses ranks that contradict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckptflow.errors import CorruptFileError, InconsistentCheckpointError
from ckptflow.formats.placements import check_placements
from ckptflow.formats.torch_tensors import AnyTensor, fills_storage, plain_tensor
from ckptflow.manifest import Mesh
from ckptflow.tensors import Shape, SourceFile
from ckptflow.torchfiles import DTensor, LazyTensor, ShardedTensor


@dataclass(frozen=True, slots=True, eq=False)
class RankGroup:
    """The ranks of a mesh, in its order. There is one object for each list, so that parts compare it by identity."""

    ranks: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class RankPart:
    """One rank's own values of one tensor, without the objects of its file, of which there are many.

    Attributes:
        group: ranks of the mesh that the rank cut the tensor with; None for tensors without a mesh.
        coordinate: the rank's place in that mesh.
        offsets: where a ShardedTensor's shard begins in the global tensor.
        crc32: checksum of the storage, as the file's directory records it.
        fills_storage: whether the part is all of its storage.
    """

    file: SourceFile
    rank: int
    offset_bytes: int
    shape: Shape
    strides: Shape
    group: RankGroup | None = None
    coordinate: tuple[int, ...] = ()
    offsets: Shape = ()
    crc32: int | None
    storage_bytes: int
    storage_offset: int
    fills_storage: bool

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements."""
        return 0 in self.shape


@dataclass(slots=True, kw_only=True)
class RankTensor:
    """All that the ranks read so far say about one tensor.

    Attributes:
        name: as in the files.
        first: what the first rank said; later ones must say the same.
    """

    name: str
    first: AnyTensor
    parts: list[RankPart] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)


class RankTensors:
    """Collects the state dicts of all ranks, one after another."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.tensors: dict[str, RankTensor] = {}
        self._same: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._groups: dict[tuple[int, ...], RankGroup] = {}
        self._places: dict[int, tuple[RankGroup, tuple[int, ...]] | None] = {}

    def add(self, rank: int, file: SourceFile, entries: Mapping[str, AnyTensor]) -> None:
        """Add one rank's state dict.

        Raises:
            CheckpointError: it contradicts itself, or the ranks before it.
        """
        self._places = {}
        for name, tensor in entries.items():
            known = self.tensors.get(name)
            if known is None:
                known = self.tensors[name] = RankTensor(name=name, first=tensor)
                if isinstance(tensor, DTensor):
                    check_placements(name, tensor, file.path)
            else:
                _check_same_description(known, tensor, file)
            known.ranks.add(rank)
            known.parts.extend(self._parts(name, tensor, rank, file))

    def _parts(self, name: str, tensor: AnyTensor, rank: int, file: SourceFile) -> Iterable[RankPart]:
        if isinstance(tensor, ShardedTensor):
            for shard in tensor.local_shards:
                local = plain_tensor(name, shard.tensor, file.path)
                if local.shape != shard.region.sizes or local.dtype_name != tensor.dtype_name:
                    raise wrong_shape(name, file, shard.region.sizes, local.shape)
                part = self._part(local, rank, file)
                part.offsets = shard.region.offsets
                yield part
            return
        local = plain_tensor(name, tensor.local if isinstance(tensor, DTensor) else tensor, file.path)
        part = self._part(local, rank, file)
        if isinstance(tensor, DTensor):
            if local.dtype_name != tensor.dtype_name:
                raise CorruptFileError(
                    "a DTensor's values have another dtype than it says",
                    file=file.path,
                    tensor=name,
                    expected=tensor.dtype_name,
                    found=local.dtype_name,
                )
            self._add_coordinate(name, tensor, part)
            if part.group is None:
                return
        yield part

    def _part(self, local: LazyTensor, rank: int, file: SourceFile) -> RankPart:
        storage = local.storage
        return RankPart(
            file=file,
            rank=rank,
            offset_bytes=local.byte_offset,
            shape=self._one(local.shape),
            strides=self._one(local.strides),
            crc32=storage.crc32,
            storage_bytes=storage.nbytes,
            storage_offset=local.storage_offset,
            fills_storage=fills_storage(local),
        )

    def _one(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """The same tuple object for equal tuples: a checkpoint has millions of them and few distinct ones."""
        return self._same.setdefault(values, values)

    def _add_coordinate(self, name: str, tensor: DTensor, part: RankPart) -> None:
        # The tensors of one file share its few mesh objects.
        key = id(tensor.mesh)
        if key not in self._places:
            self._places[key] = self._place(name, tensor, part)
        place = self._places[key]
        if place is not None:
            part.group, part.coordinate = place
        elif not part.is_empty:
            raise InconsistentCheckpointError(
                "a rank file holds values of a tensor whose device mesh doesn't contain that rank",
                file=part.file.path,
                tensor=name,
                expected=f"rank {part.rank} of {self.world_size}, as the file's name says, in the mesh",
                found=f"mesh of ranks {list(tensor.mesh.groups[0]) if tensor.mesh.groups else []}",
                fix="the file was renamed or belongs to a save at another world size",
            )

    def _place(self, name: str, tensor: DTensor, part: RankPart) -> tuple[RankGroup, tuple[int, ...]] | None:
        """Where a mesh has the rank; None if nowhere."""
        ranks, coordinate = tensor.mesh.group_of(part.rank), tensor.mesh.coordinate_of(part.rank)
        _check_saved_by(name, tensor, part, coordinate)
        if ranks is None or coordinate is None:
            return None
        if max(ranks) >= self.world_size or len(set(ranks)) != len(ranks):
            raise InconsistentCheckpointError(
                "a tensor was sharded over other ranks than there are files for",
                file=part.file.path,
                tensor=name,
                expected=f"ranks below the world size {self.world_size} that the file names say",
                found=f"mesh of ranks {list(ranks)}",
                fix="the files were renamed or belong to a save at another world size",
            )
        return self._groups.setdefault(ranks, RankGroup(ranks)), coordinate

    def mesh(self) -> Mesh | None:
        """The mesh over all ranks that most tensors have, or the commonest one."""
        meshes = Counter(
            Mesh(shape=t.first.mesh.shape, dim_names=t.first.mesh.dim_names or ())
            for t in self.tensors.values()
            if isinstance(t.first, DTensor)
        )
        if not meshes:
            return None

        def weight(mesh: Mesh) -> tuple[bool, int, int]:
            ranks = 1
            for size in mesh.shape:
                ranks *= size
            return ranks == self.world_size, len(mesh.shape), meshes[mesh]

        return max(meshes, key=weight)


def _check_saved_by(name: str, tensor: DTensor, part: RankPart, coordinate: Shape | None) -> None:
    """A rank's shards don't say where they belong, but its mesh says which rank saved it: renamed files show here."""
    saved = tensor.mesh.saved_coordinate
    if saved is not None and coordinate is not None and saved != coordinate:
        raise InconsistentCheckpointError(
            "a rank file was saved by another rank than its name says",
            file=part.file.path,
            tensor=name,
            expected=f"mesh coordinate {list(coordinate)} for rank {part.rank}",
            found=f"mesh coordinate {list(saved)}",
            fix="rank files were swapped or renamed; give them back the names that the trainer wrote",
        )


def same_description(first: AnyTensor, other: AnyTensor) -> bool:
    """Whether two tensors are described alike, whatever their values."""
    return _description(first) == _description(other)


def _check_same_description(known: RankTensor, tensor: AnyTensor, file: SourceFile) -> None:
    ours, theirs = _description(known.first), _description(tensor)
    for label, value in ours.items():
        if theirs.get(label) != value:
            raise InconsistentCheckpointError(
                f"rank files disagree on the {label} of a tensor",
                file=file.path,
                tensor=known.name,
                expected=f"{value}, as in {known.parts[0].file.path if known.parts else 'the ranks before'}",
                found=theirs.get(label),
                fix="the rank files are of different saves; let the trainer write the checkpoint again",
            )


def _description(tensor: AnyTensor) -> dict[str, object]:
    facts: dict[str, object] = {"kind": type(tensor).__name__, "shape": tensor.shape, "dtype": tensor.dtype_name}
    if isinstance(tensor, DTensor):
        facts["device mesh"] = tensor.mesh.shape
        facts["mesh dim names"] = tensor.mesh.dim_names
        facts["placements"] = tensor.placements
        facts["shard order"] = tensor.shard_order
    if isinstance(tensor, ShardedTensor):
        facts["shards"] = tensor.all_regions
    return facts


def wrong_shape(name: str, file: SourceFile, expected: Shape, found: Shape) -> InconsistentCheckpointError:
    """The error for a rank's part that doesn't have the shape that placements or regions give it."""
    return InconsistentCheckpointError(
        "a rank's part of a tensor has another shape than its placements say",
        file=file.path,
        tensor=name,
        expected=f"shape {list(expected)}",
        found=f"shape {list(found)}",
        fix="the rank files are of different saves, or the file was renamed to another rank",
    )
