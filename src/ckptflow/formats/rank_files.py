"""The files of an FSDP rank directory, by name: which belong together, which are missing, which are not weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckptflow.errors import AmbiguousCheckpointError, InconsistentCheckpointError
from ckptflow.manifest import LeftOut

RANK_FILE = re.compile(r"^model_world_size_(\d+)_rank_(\d+)\.pt$")
OTHER_RANK_FILE = re.compile(r"^(optim|extra_state)_world_size_\d+_rank_\d+\.pt$")
CONFIG_NAME = "fsdp_config.json"
OTHER_REASONS = {"optim": "optimizer state, not weights", "extra_state": "learning rate and random state, not weights"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSet:
    """Rank files of one save.

    Attributes:
        world_size: ranks that the names speak of.
        names: rank → file name, in rank order; ranks may be missing.
    """

    world_size: int
    names: Mapping[int, str]

    @property
    def missing(self) -> list[int]:
        """Ranks without a file."""
        return [rank for rank in range(self.world_size) if rank not in self.names]


def rank_sets(names: Iterable[str]) -> list[RankSet]:
    """One set per world size that the names speak of."""
    found: dict[int, dict[int, str]] = {}
    for name in names:
        match = RANK_FILE.match(name)
        if match:
            world_size, rank = int(match.group(1)), int(match.group(2))
            found.setdefault(world_size, {})[rank] = name
    return [RankSet(world_size=size, names=dict(sorted(ranks.items()))) for size, ranks in sorted(found.items())]


def choose_set(sets: list[RankSet], declared: int | None, directory: str) -> RankSet:
    """The set that ``fsdp_config.json`` names, or the only one.

    Raises:
        InconsistentCheckpointError: names and config contradict each other.
        AmbiguousCheckpointError: several sets and nothing that says which.
    """
    sizes = [s.world_size for s in sets]
    if declared is not None:
        chosen = next((s for s in sets if s.world_size == declared), None)
        if chosen is None:
            raise InconsistentCheckpointError(
                "fsdp_config.json names another world size than the rank files",
                file=directory,
                expected=f"world size {declared}",
                found=f"files of world size {', '.join(map(str, sizes))}",
            )
    elif len(sets) > 1:
        raise AmbiguousCheckpointError(
            "rank files of several world sizes lie in one directory",
            file=directory,
            found=f"world sizes {', '.join(map(str, sizes))}",
            fix="move the older save away; fsdp_config.json, which would tell, is missing",
        )
    else:
        chosen = sets[0]
    foreign = [name for rank, name in chosen.names.items() if rank >= chosen.world_size]
    if foreign:
        raise InconsistentCheckpointError(
            "a rank file whose rank is not below its world size", file=f"{directory}/{foreign[0]}"
        )
    return chosen


def left_out_files(names: Iterable[str], sizes: Mapping[str, int], chosen: RankSet) -> list[LeftOut]:
    """Files beside the chosen ranks that are no weights, or weights of another save."""
    taken = set(chosen.names.values())
    left_out = []
    for name in names:
        other = OTHER_RANK_FILE.match(name)
        if other:
            left_out.append(LeftOut(name=name, reason=OTHER_REASONS[other.group(1)], nbytes=sizes.get(name, 0)))
        elif RANK_FILE.match(name) and name not in taken:
            reason = f"left over from a save at another world size than {chosen.world_size}"
            left_out.append(LeftOut(name=name, reason=reason, nbytes=sizes.get(name, 0)))
    return left_out
