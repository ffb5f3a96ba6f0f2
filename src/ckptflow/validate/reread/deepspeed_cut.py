"""Tensor-parallel ranks put together by the shapes that config.json tells, not by what the checkpoint says of its cuts.

A tensor that each rank has in its full shape is the same on all; any other is cut along the one dim in which the ranks'
parts, one after another, make up the full shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptflow.errors import InconsistentCheckpointError, VerificationError
from ckptflow.tensors import Shape
from ckptflow.validate.reread.base import Rereader, UncoveredError
from ckptflow.validate.skeleton import describe_model

if TYPE_CHECKING:
    import torch


class CutRereader:
    """All tensor-parallel ranks of DeepSpeed.

    Args:
        ranks: what each rank holds, in rank order.
        info: DeepSpeed's ``universal_checkpoint_info``.
        config_dir: directory with config.json.

    Raises:
        UncoveredError: parameters that are several cut ones in one, or a config.json that transformers can't tell.
    """

    how = "torch.load of every rank's states, parts put together to the shapes that transformers tells"

    def __init__(self, ranks: Sequence[Rereader], info: object, config_dir: Path) -> None:
        if not isinstance(info, Mapping) or _in_several_pieces(info):
            raise UncoveredError("DeepSpeed's parameters that tensor parallelism cuts into several pieces a rank")
        try:
            self._wanted = describe_model(config_dir).shapes
        except VerificationError as error:
            raise UncoveredError(f"shapes that transformers does not tell: {error}") from error
        self._ranks = ranks

    def shape(self, fqn: str) -> Shape | None:
        return None if self._parts(fqn) is None else tuple(self._wanted[fqn])

    def read(self, fqn: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        import torch

        found = self._parts(fqn)
        if found is None:
            raise RuntimeError(f"{fqn} is not covered")
        dim, parts = found
        if dim is None:
            first, *others = (rank.read(fqn, offsets, sizes) for rank in self._ranks)
            if not all(torch.equal(first, other) for other in others):
                raise InconsistentCheckpointError("tensor-parallel ranks hold different values", tensor=fqn)
            return first
        boxes, begin = [], 0
        for rank, part in zip(self._ranks, parts, strict=True):
            low = max(offsets[dim], begin)
            high = min(offsets[dim] + sizes[dim], begin + part[dim])
            if low < high:
                inner = (*offsets[:dim], low - begin, *offsets[dim + 1 :])
                boxes.append(rank.read(fqn, inner, (*sizes[:dim], high - low, *sizes[dim + 1 :])))
            begin += part[dim]
        return torch.cat(boxes, dim)

    def _parts(self, fqn: str) -> tuple[int | None, list[Shape]] | None:
        """The dim along which a tensor is cut (None: not at all), and the shapes of the parts; None if none fits."""
        wanted, parts = self._wanted.get(fqn), [rank.shape(fqn) for rank in self._ranks]
        known = [part for part in parts if part is not None]
        if wanted is None or len(known) != len(parts) or {len(part) for part in known} != {len(wanted)}:
            return None
        if all(part == wanted for part in known):
            return None, known
        for dim, size in enumerate(wanted):
            rest = {(*part[:dim], *part[dim + 1 :]) for part in (*known, wanted)}
            if len(rest) == 1 and sum(part[dim] for part in known) == size:
                return dim, known
        return None


def _in_several_pieces(info: Mapping[str, object]) -> bool:
    """Whether a rank's part of a parameter is more than one piece of it, as of q, k and v in one."""
    affine = info.get("affine_map")
    params = affine.get("params") if isinstance(affine, Mapping) else None
    for entry in params.values() if isinstance(params, Mapping) else ():
        by_rank = entry.get("ranks") if isinstance(entry, Mapping) else None
        for part in by_rank.values() if isinstance(by_rank, Mapping) else ():
            if not isinstance(part, Mapping) or len(part.get("pieces") or ()) != 1:
                return True
    return False
