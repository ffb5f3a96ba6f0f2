"""Megatron-LM's legacy ``torch`` checkpoints: ``iter_0000010/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``.

Each file is one (tensor, pipeline, expert) rank's own view: layers and experts are numbered from 0 in each, and
``linear_fc1`` is [gate; up] per rank (https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/checkpointing.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ckptflow.errors import CheckpointError, IncompleteCheckpointError, InconsistentCheckpointError
from ckptflow.formats.base import Completeness, Location, ReadOptions
from ckptflow.formats.config_files import directory_names, find_config_dir, needed_config_dir, read_config
from ckptflow.formats.dcp import file_size
from ckptflow.formats.files import list_names
from ckptflow.formats.megatron_args import WHY_CONFIG, Grid, grid_of
from ckptflow.formats.megatron_saves import Rank, check_one_save, check_places
from ckptflow.formats.megatron_states import RankState, read_rank, with_global_experts
from ckptflow.formats.written_together import check_written_together
from ckptflow.manifest import CheckpointManifest, EqualSources, LeftOut
from ckptflow.tensors import TensorSource
from ckptflow.transforms.megatron_args import check_args
from ckptflow.transforms.megatron_merge import REPLICA_REASON, join_tree
from ckptflow.transforms.megatron_names import MegatronModel, describe, to_huggingface

RANK_DIRECTORY = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")
WEIGHT_FILES = ("model_optim_rng.pt", "model_rng.pt")
OTHER_FILES = re.compile(r"(distrib_)?optim.*\.pt")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


class MegatronLegacyCheckpoint:
    """A directory of ``mp_rank_*`` directories."""

    layout = "megatron-legacy"
    supersedes: tuple[str, ...] = ()

    def find(self, path: Path) -> list[Location]:
        """A directory that holds rank directories."""
        if not any(RANK_DIRECTORY.fullmatch(name) for name in directory_names(path)):
            return []
        return [Location(layout=self.layout, path=path, root=path)]

    def check(self, location: Location) -> Completeness:
        """The first file's args tell the grid; every rank of it must have a file that parses to its end."""
        try:
            grid, states = _read_ranks(location)
        except CheckpointError as error:
            return Completeness(state="incomplete", reason=f"{error.what}: {error.expected or error.file}")
        except FileNotFoundError:
            return Completeness(state="incomplete", reason="files vanish while they are looked at")
        return Completeness(state="complete", reason=f"all {len(states)} ranks of {grid.mesh}")

    def read(self, location: Location, options: ReadOptions) -> CheckpointManifest:
        """The model under transformers' names, as windows on the ranks' tensors."""
        directory, root = location.path, location.root
        grid, states = _read_ranks(location)
        config = read_config(needed_config_dir(directory, root, options, WHY_CONFIG))
        model = describe(config, _output_rows(states.values(), grid))
        first = next(iter(states.values()))
        for state in states.values():
            check_args(state.args, model, state.file.path)
        tree, replicas = _tree(states, grid, model)
        result = to_huggingface(tree, model)
        return CheckpointManifest(
            layout=self.layout,
            path=directory,
            global_step=location.global_step if location.global_step is not None else first.iteration,
            world_size=len(states),
            mesh=grid.mesh,
            tensors=result.tensors,
            ties=result.ties,
            equal=(*result.equal, *replicas),
            left_out=(*result.left_out, *_left_out(states.values(), directory)),
            files=tuple(state.file for state in states.values()),
            storage_bytes=sum(state.storage_bytes for state in states.values()),
            wasted_bytes=sum(state.wasted_bytes for state in states.values()),
            config_dir=options.config_dir or find_config_dir(directory, root),
            notes=(
                "names are transformers'; the tensors are windows on Megatron's, which fuse q, k, v and gate, up",
                *result.notes,
            ),
        )


def _output_rows(states: Iterable[RankState], grid: Grid) -> int | None:
    """Rows of the output layer if tensor parallelism splits them; None where there is none."""
    layers = (chunk.get("output_layer.weight") for state in states for chunk in state.chunks)
    return next((layer.shape[0] * grid.tp for layer in layers if layer is not None and layer.shape), None)


def _read_ranks(location: Location) -> tuple[Grid, dict[Rank, RankState]]:
    """All ranks' files; they must be one save.

    Raises:
        IncompleteCheckpointError: a rank is missing.
        InconsistentCheckpointError: ranks of several saves.
    """
    directory, root = location.path, location.root
    present = [name for name in directory_names(directory) if RANK_DIRECTORY.fullmatch(name)]
    if not present:
        raise IncompleteCheckpointError("the ranks' directories are gone", file=directory)
    first = read_rank(_weight_file(directory / present[0]), root)
    grid = grid_of(first.args, first.file.path)
    names = {_directory_of(rank, grid): rank for rank in _ranks(grid)}
    missing = [name for name in names if name not in present]
    if missing:
        raise IncompleteCheckpointError(
            f"{len(missing)} of {len(names)} ranks have no directory",
            file=directory,
            expected=", ".join(missing[:6]),
            fix="wait until all ranks have saved, or copy the missing directories too",
        )
    foreign = [name for name in present if name not in names and not _is_optimizer_alone(directory / name)]
    if foreign:
        raise InconsistentCheckpointError(
            "directories of ranks that the save did not have",
            file=directory / foreign[0],
            expected=str(grid.mesh),
            found=", ".join(foreign[:6]),
            fix="move what an older save with more ranks left out of the way",
        )
    states = {rank: read_rank(_weight_file(directory / name), root) for name, rank in names.items()}
    check_one_save(states, grid, directory)
    check_written_together(state.file for state in states.values())
    return grid, states


def _is_optimizer_alone(directory: Path) -> bool:
    """Older Megatron-LM keeps each data-parallel rank's optimizer in ``mp_rank_TT[_PPP]_DDD/optim.pt``."""
    names = list_names(directory)
    return bool(names) and all(OTHER_FILES.fullmatch(name) for name in names)


def _ranks(grid: Grid) -> Iterator[Rank]:
    for pp in range(grid.pp):
        for ep in range(grid.ep):
            for tp in range(grid.tp):
                yield tp, pp, ep


def _directory_of(rank: Rank, grid: Grid) -> str:
    tp, pp, ep = rank
    name = f"mp_rank_{tp:02d}"
    name += f"_{pp:03d}" if grid.pp > 1 else ""
    return name + (f"_{ep:03d}" if grid.ep > 1 else "")


def _weight_file(directory: Path) -> Path:
    names = list_names(directory)
    found = [name for name in WEIGHT_FILES if name in names]
    if len(found) != 1:
        raise IncompleteCheckpointError(
            "a rank has no weight file" if not found else "a rank has two weight files",
            file=directory,
            expected=" or ".join(WEIGHT_FILES),
            found=", ".join(names) or "nothing",
            fix="wait until all ranks have saved",
        )
    return directory / found[0]


def _tree(
    states: Mapping[Rank, RankState], grid: Grid, model: MegatronModel
) -> tuple[dict[str, TensorSource], tuple[EqualSources, ...]]:
    """Global tensors, and the copies that must equal them: replicas in tensor-, pipeline- and expert-parallel ranks."""
    offsets = _layer_offsets(states, grid, model)
    check_places(states, offsets)
    if model.dims["experts"] % grid.ep:
        raise InconsistentCheckpointError(
            "experts don't divide among ranks", expected=grid.ep, found=model.dims["experts"]
        )
    tree: dict[str, TensorSource] = {}
    equal: list[EqualSources] = []
    for (pp, chunk), offset in offsets.items():
        for ep in range(grid.ep):
            ranks = [_global_names(states[(tp, pp, ep)], chunk, offset, ep, grid, model) for tp in range(grid.tp)]
            joined, copies = join_tree(_by_name(ranks, states, pp, ep), model.wanted)
            equal.extend(copies)
            for name, source in joined.items():
                first = tree.setdefault(name, source)
                if (first.shape, first.dtype) != (source.shape, source.dtype):
                    raise InconsistentCheckpointError(
                        "ranks hold a tensor in different shapes or dtypes",
                        tensor=name,
                        expected=f"{list(first.shape)} {first.dtype}",
                        found=f"{list(source.shape)} {source.dtype}",
                    )
                if first is not source:
                    equal.append(EqualSources(fqn=name, first=first, second=source, reason=REPLICA_REASON))
    return tree, tuple(equal)


def _layer_offsets(states: Mapping[Rank, RankState], grid: Grid, model: MegatronModel) -> dict[tuple[int, int], int]:
    """(pipeline rank, virtual stage) → global number of its layer 0.

    Virtual stages interleave: all ranks' stage 0, then all ranks' stage 1. Stages may hold different numbers of layers.
    """
    offsets, total = {}, 0
    chunks = len(states[(0, 0, 0)].chunks)
    for chunk in range(chunks):
        for pp in range(grid.pp):
            state = states[(0, pp, 0)]
            if len(state.chunks) != chunks:
                raise InconsistentCheckpointError(
                    "pipeline ranks have different numbers of virtual stages", file=state.file.path
                )
            numbers = {int(m[1]) for name in state.chunks[chunk] if (m := LAYER.fullmatch(name))}
            if numbers != set(range(len(numbers))):
                raise InconsistentCheckpointError(
                    "a stage's layers aren't numbered from 0", file=state.file.path, found=sorted(numbers)
                )
            offsets[(pp, chunk)] = total
            total += len(numbers)
    if total != model.dims["layers"]:
        raise InconsistentCheckpointError(
            "the stages hold another number of layers than the config's model",
            expected=model.dims["layers"],
            found=total,
            fix="check that the config belongs to this checkpoint",
        )
    return offsets


def _global_names(
    state: RankState, chunk: int, offset: int, ep: int, grid: Grid, model: MegatronModel
) -> dict[str, TensorSource]:
    named = {}
    local = model.dims["experts"] // grid.ep
    for name, source in with_global_experts(state.chunks[chunk], ep, local).items():
        match = LAYER.fullmatch(name)
        named[f"decoder.layers.{int(match[1]) + offset}.{match[2]}" if match else name] = source
    return named


def _by_name(
    ranks: list[dict[str, TensorSource]], states: Mapping[Rank, RankState], pp: int, ep: int
) -> dict[str, list[TensorSource]]:
    for tp, rank in enumerate(ranks):
        if rank.keys() != ranks[0].keys():
            raise InconsistentCheckpointError(
                "tensor-parallel ranks hold different tensors",
                file=states[(tp, pp, ep)].file.path,
                tensor=sorted(rank.keys() ^ ranks[0].keys())[0],
            )
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def _left_out(states: Iterable[RankState], directory: Path) -> list[LeftOut]:
    """Training state in the files and beside them, one entry per kind."""
    sizes: dict[tuple[str, str], int] = {}
    for state in states:
        for entry in state.left_out:
            name = "_extra_state.*" if "_extra_state" in entry.name else entry.name
            sizes[(name, entry.reason)] = sizes.get((name, entry.reason), 0) + entry.nbytes
    for rank in directory_names(directory):
        for name in list_names(directory / rank):
            if OTHER_FILES.fullmatch(name):
                sizes[(name, "optimizer state")] = sizes.get((name, "optimizer state"), 0) + file_size(
                    directory / rank / name
                )
    return [LeftOut(name=name, reason=reason, nbytes=nbytes) for (name, reason), nbytes in sizes.items()]
