"""Puts ZeRO's flat fp32 partitions together again: pure arithmetic on byte ranges.

ZeRO 1 and 2 lay the parameters of a param group one after another into one flat vector, pad its end, and cut it into
equal slices, one a rank; a parameter may span ranks. ZeRO 3 cuts each parameter on its own into ceil(numel / ranks)
elements a rank, the last one padded; a rank's cuts follow each other. As in deepspeed/utils/zero_to_fp32.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ckptflow.dtypes import DType
from ckptflow.errors import CkptflowError, InconsistentCheckpointError, UnsupportedCheckpointError
from ckptflow.tensors import Piece, Shape, SourceFile, TensorSource, flat_pieces

# nccl_start_alignment_factor in deepspeed/runtime/zero/stage_1_and_2.py: group vectors are padded to 2 x ranks.
ALIGNMENT = 2
_FIX = "a rank's file belongs to another save or another run; let the trainer write the checkpoint again"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatSlice:
    """A rank's part of a flat vector.

    Attributes:
        file: the file that holds it.
        offset_bytes: where its first element is.
        numel: its length, in elements.
        dtype: element type.
        padding: elements that the rank cut off the end before it saved; None where it doesn't tell.
        fragments: FQN → (start, numel) in this slice, as the optimizer recorded it; None where it didn't.
    """

    file: SourceFile
    offset_bytes: int
    numel: int
    dtype: DType
    padding: int | None = None
    fragments: Mapping[str, tuple[int, int]] | None = None

    def pieces(self, shape: Shape, at: int, start: int, numel: int) -> list[Piece]:
        """Elements ``[start, start + numel)`` of this slice as elements from ``at`` on of a tensor of ``shape``."""
        offset = self.offset_bytes + start * self.dtype.itemsize
        return flat_pieces(self.file, offset, shape, self.dtype, at, at + numel)


def join_group(
    shapes: Mapping[str, Shape], slices: Sequence[FlatSlice], *, padded_params: bool = False
) -> dict[str, TensorSource]:
    """ZeRO 1 and 2: the parameters of one group from the slices of its ranks.

    Args:
        shapes: FQN → shape, in the order of the flat vector.
        slices: one a rank, in rank order.
        padded_params: single parameters are padded; then only the recorded fragments tell where they are.

    Raises:
        InconsistentCheckpointError: sizes don't fit, or differ from what the optimizer recorded.
    """
    if padded_params:
        cuts = _recorded_cuts(shapes, slices)
    else:
        cuts = _even_cuts(shapes, slices)
        _check_recorded(cuts, slices)
    tensors: dict[str, TensorSource] = {}
    for fqn, shape in shapes.items():
        pieces: list[Piece] = []
        at = 0
        for rank, start, numel in cuts[fqn]:
            pieces += slices[rank].pieces(shape, at, start, numel)
            at += numel
        if at != prod(shape):
            raise _misfit("the slices of a parameter don't add up", slices[0], fqn, f"{prod(shape)} elements", f"{at}")
        tensors[fqn] = TensorSource(shape, slices[0].dtype, tuple(pieces))
    return tensors


_Cuts = dict[str, list[tuple[int, int, int]]]
"""FQN → (rank, start in the rank's slice, elements), in order."""


def _even_cuts(shapes: Mapping[str, Shape], slices: Sequence[FlatSlice]) -> _Cuts:
    size = _slice_size(sum(map(prod, shapes.values())), slices)
    cuts: _Cuts = {}
    begin = 0
    for fqn, shape in shapes.items():
        end = begin + prod(shape)
        cuts[fqn] = []
        at = begin
        while at < end:
            rank = at // size
            stop = min(end, (rank + 1) * size)
            cuts[fqn].append((rank, at - rank * size, stop - at))
            at = stop
        begin = end
    return cuts


def _slice_size(wanted: int, slices: Sequence[FlatSlice]) -> int:
    """Elements of each rank's slice with its padding; checks that the slices hold ``wanted`` elements and no more.

    Old versions keep the padding in the file. New ones cut it off, and then the last slices are shorter. BF16_Optimizer
    tells it and keeps it.
    """
    told = sum(s.padding or 0 for s in slices)
    kept = sum(s.numel for s in slices) >= wanted + told
    size = max(s.numel + (0 if kept else s.padding or 0) for s in slices)
    total = size * len(slices)
    aligned = -(-wanted // (ALIGNMENT * len(slices))) * ALIGNMENT * len(slices)
    if wanted > total or total > max(aligned, wanted + told):
        found = " + ".join(str(s.numel) for s in slices[:8]) + (" + …" if len(slices) > 8 else "")
        raise _misfit(
            "the fp32 slices don't hold the parameters of their group",
            slices[0],
            None,
            f"{wanted} elements, padded to {aligned}",
            found,
        )
    for rank, part in enumerate(slices):
        needed = min(max(wanted - rank * size, 0), size)
        if part.numel < needed or part.numel > size:
            raise _misfit(
                f"the fp32 slice of rank {rank} has another size than its neighbours",
                part,
                None,
                f"{needed} elements, or {size} with padding",
                f"{part.numel} elements",
            )
    return size


def _check_recorded(cuts: _Cuts, slices: Sequence[FlatSlice]) -> None:
    computed: list[dict[str, tuple[int, int]]] = [{} for _ in slices]
    for fqn, parts in cuts.items():
        for rank, start, numel in parts:
            computed[rank][fqn] = (start, numel)
    for rank, part in enumerate(slices):
        recorded = {n: a for n, a in (part.fragments or {}).items() if a[1]}
        if part.fragments is None or recorded == computed[rank]:
            continue
        fqn = next(n for n in [*recorded, *computed[rank]] if recorded.get(n) != computed[rank].get(n))
        raise _misfit(
            f"the optimizer of rank {rank} recorded another place for a parameter",
            part,
            fqn,
            f"start and size {computed[rank].get(fqn)} by param_shapes",
            recorded.get(fqn),
        )


def _recorded_cuts(shapes: Mapping[str, Shape], slices: Sequence[FlatSlice]) -> _Cuts:
    cuts: _Cuts = {fqn: [] for fqn in shapes}
    for rank, part in enumerate(slices):
        if part.fragments is None:
            raise _misfit(
                "parameters are padded, and nothing tells where they begin", part, None, "param_slice_mappings", None
            )
        for fqn, (start, numel) in part.fragments.items():
            if fqn not in cuts or start < 0 or numel < 0 or start + numel > part.numel:
                raise _misfit(
                    "a recorded fragment lies outside its slice",
                    part,
                    fqn,
                    f"within {part.numel} elements",
                    (start, numel),
                )
            cuts[fqn].append((rank, start, numel))
    return cuts


def join_sharded(shapes: Mapping[str, Shape], ranks: Sequence[Sequence[FlatSlice]]) -> dict[str, TensorSource]:
    """ZeRO 3: all parameters from the ranks' flat groups, each rank's groups one after another.

    Args:
        shapes: FQN → shape, in the order of the flat vectors.
        ranks: the groups of each rank, in rank order.

    Raises:
        InconsistentCheckpointError: a rank holds more or less than its share.
    """
    world = len(ranks)
    wanted = sum(-(-prod(shape) // world) for shape in shapes.values())
    for rank, groups in enumerate(ranks):
        found = sum(group.numel for group in groups)
        if found != wanted:
            raise _misfit(
                f"rank {rank} doesn't hold its share of the parameters",
                groups[0] if groups else None,
                None,
                f"{wanted} elements",
                f"{found} elements",
            )
    readers = [_Reader(groups) for groups in ranks]
    tensors: dict[str, TensorSource] = {}
    for fqn, shape in shapes.items():
        numel = prod(shape)
        share = -(-numel // world)
        pieces: list[Piece] = []
        for rank, reader in enumerate(readers):
            begin = min(rank * share, numel)
            pieces += reader.take(shape, begin, min(begin + share, numel) - begin, share)
        tensors[fqn] = TensorSource(shape, ranks[0][0].dtype, tuple(pieces))
    return tensors


def join_fragments(fqn: str, shape: Shape, slices: Sequence[FlatSlice]) -> TensorSource:
    """ZeRO 3: one frozen parameter from the fragments of all ranks.

    Raises:
        InconsistentCheckpointError: a fragment has another size than ceil(numel / ranks).
    """
    numel = prod(shape)
    share = -(-numel // len(slices))
    pieces: list[Piece] = []
    for rank, part in enumerate(slices):
        begin = min(rank * share, numel)
        here = min(begin + share, numel) - begin
        if not here <= part.numel <= share:
            raise _misfit(
                f"the fragment of rank {rank} of a frozen parameter has a wrong size",
                part,
                fqn,
                f"{share} elements",
                part.numel,
            )
        pieces += part.pieces(shape, begin, 0, here)
    return TensorSource(shape, slices[0].dtype, tuple(pieces))


def recorded_shapes(ranks: Sequence[Sequence[FlatSlice]], known: Mapping[str, Shape]) -> list[dict[str, Shape]]:
    """For each group the parameters that its fragments name: BF16_Optimizer without ZeRO saves no ``param_shapes``.

    Args:
        ranks: the groups of each rank, in rank order.
        known: FQN → shape; a parameter that is not in it gets a flat one.

    Raises:
        UnsupportedCheckpointError: the ranks recorded no fragments.
    """
    groups: list[dict[str, Shape]] = []
    for slices in zip(*ranks, strict=True):
        numels: Counter[str] = Counter()
        for part in slices:
            numels.update({fqn: numel for fqn, (_, numel) in (part.fragments or {}).items()})
        if not numels:
            raise UnsupportedCheckpointError(
                "nothing tells which parameters the fp32 masters are of",
                file=slices[0].file.path,
                expected="param_shapes in the model states, or param_slice_mappings here",
                fix="let DeepSpeed load it and save it with ZeRO stage 1",
            )
        groups.append({fqn: known.get(fqn, (numel,)) for fqn, numel in numels.items()})
    return groups


class _Reader:
    """Walks through the groups of one rank; a parameter may span two of them."""

    def __init__(self, groups: Sequence[FlatSlice]) -> None:
        self._groups = groups
        self._group = 0
        self._at = 0

    def take(self, shape: Shape, at: int, used: int, share: int) -> list[Piece]:
        """The next ``share`` elements, of which the first ``used`` are elements from ``at`` on of the parameter."""
        pieces: list[Piece] = []
        left = share
        while left:
            group = self._groups[self._group]
            if self._at == group.numel:
                self._group, self._at = self._group + 1, 0
                continue
            here = min(left, group.numel - self._at)
            kept = min(here, used)
            pieces += group.pieces(shape, at, self._at, kept)
            at, used, left, self._at = at + kept, used - kept, left - here, self._at + here
        return pieces


def _misfit(what: str, part: FlatSlice | None, fqn: str | None, expected: object, found: object) -> CkptflowError:
    file = None if part is None else part.file.path
    return InconsistentCheckpointError(what, file=file, tensor=fqn, expected=expected, found=found, fix=_FIX)
