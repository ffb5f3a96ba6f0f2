"""FSDP rank files: ``model_world_size_W_rank_R.pt``, one state dict of DTensors or ShardedTensors per rank.

Written by verl and everything that follows it; FSDP1, FSDP2, HSDP, and both with tensor parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptflow.errors import CheckpointError, CorruptFileError, IncompleteCheckpointError, InconsistentCheckpointError
from ckptflow.files.jsonfiles import read_json_object
from ckptflow.formats.base import Completeness, Location, ReadOptions
from ckptflow.formats.files import checked_file, list_names
from ckptflow.formats.own_name import check_own_name
from ckptflow.formats.peft_config import CONFIG_NAME as CONFIG_FILE
from ckptflow.formats.peft_config import SHORT_NAME, adapter_spec
from ckptflow.formats.rank_copies import assemble
from ckptflow.formats.rank_files import CONFIG_NAME, RANK_FILE, RankSet, choose_set, left_out_files, rank_sets
from ckptflow.formats.rank_steps import check_one_step
from ckptflow.formats.rank_tensors import RankTensors, same_description
from ckptflow.formats.run_tracker import tracked_step, tracker_lag
from ckptflow.formats.torch_tensors import AnyTensor, shared_windows, state_dict_entries, storage_use
from ckptflow.formats.written_together import check_written_together
from ckptflow.manifest import CheckpointManifest, EqualSources, LeftOut
from ckptflow.tensors import SourceFile, TensorSource
from ckptflow.torchfiles import DTensor, LazyTensor, ShardedTensor, open_torch_file
from ckptflow.transforms.fqn import TRL_HEAD, model_names

MODEL_DIRECTORY = "huggingface"
STEP_DIRECTORY = re.compile(r"global_step_?(\d+)$")


class FsdpRankFiles:
    """The layout ``fsdp``."""

    layout = "fsdp"
    supersedes: tuple[str, ...] = ()

    def find(self, path: Path) -> list[Location]:
        """See ``Format.find``."""
        if not any(RANK_FILE.match(name) for name in list_names(path)):
            return []
        step = STEP_DIRECTORY.search(path.parent.name)
        if step is None or STEP_DIRECTORY.search(path.name):
            return [Location(layout=self.layout, path=path, root=path)]
        return [Location(layout=self.layout, path=path, root=path.parent, role=path.name)]

    def check(self, location: Location) -> Completeness:
        """See ``Format.check``."""
        try:
            chosen, _ = _chosen_set(location.path, location.root)
            if chosen.missing:
                raise _missing_ranks(location.path, chosen)
            files = [checked_file(location.path / name, location.root) for name in chosen.names.values()]
            for file in files:
                check_own_name(open_torch_file(file.path), RANK_FILE)
            _check_one_save(location.path, location.root, chosen, files)
        except IncompleteCheckpointError as error:
            announced = tracked_step(location.path) >= (_step_of(location) or 0)
            return Completeness(state="incomplete" if announced else "in-progress", reason=_one_line(error))
        except CheckpointError as error:
            return Completeness(state="incomplete", reason=_one_line(error))
        lag = tracker_lag(location.path, _step_of(location), max(file.mtime_ns for file in files))
        reason = f"all {chosen.world_size} rank files are whole"
        if lag is None:
            return Completeness(state="complete", reason=reason)
        return Completeness(state="in-progress", reason=f"{reason}, but {lag}, and it is written last")

    def read(self, location: Location, options: ReadOptions) -> CheckpointManifest:
        """See ``Format.read``."""
        directory, root = location.path, location.root
        chosen, notes = _chosen_set(directory, root)
        if chosen.missing:
            raise _why_missing(directory, root, chosen)
        ranks = _read_ranks(directory, root, chosen)
        _check_one_save(directory, root, chosen, ranks.files)
        names = model_names(ranks.tensors.tensors)
        mesh = ranks.tensors.mesh()
        tensors, equal, ties = _assemble_all(ranks, names)
        if any(name.startswith(TRL_HEAD) for name in names.values()):
            notes.append("the tensors v_head.* are trl's value head, which config.json's model class doesn't have")
        listed = list_names(directory)
        left_out = [
            *ranks.left_out,
            *left_out_files(listed, _sizes(directory, listed), chosen),
            *_consolidated(directory),
        ]
        peft = directory / "lora_adapter" / CONFIG_FILE
        adapter, adapter_notes = adapter_spec(tensors, peft, root, directory / SHORT_NAME)
        return CheckpointManifest(
            layout=self.layout,
            path=directory,
            global_step=location.global_step,
            world_size=chosen.world_size,
            mesh=mesh,
            tensors=tensors,
            ties=ties,
            equal=tuple(equal),
            left_out=tuple(left_out),
            files=tuple(ranks.files),
            storage_bytes=ranks.storage_bytes,
            wasted_bytes=ranks.wasted_bytes,
            config_dir=_config_dir(directory, options),
            adapter=adapter,
            notes=(*notes, *adapter_notes),
        )


@dataclass(slots=True)
class _Ranks:
    """What all rank files said together; ``ties`` holds those that every rank so far confirms."""

    tensors: RankTensors
    files: list[SourceFile] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    ties: dict[str, str] = field(default_factory=dict)
    storage_bytes: int = 0
    wasted_bytes: int = 0


def _read_ranks(directory: Path, root: Path, chosen: RankSet) -> _Ranks:
    ranks = _Ranks(RankTensors(chosen.world_size))
    left_out: dict[str, LeftOut] = {}
    for rank, name in chosen.names.items():
        file = checked_file(directory / name, root)
        torch = check_own_name(open_torch_file(file.path), RANK_FILE)
        entries, others = state_dict_entries(torch.value, file.path)
        if not entries:
            raise CorruptFileError("a rank file holds no tensors", file=file.path)
        ranks.tensors.add(rank, file, entries)
        ranks.files.append(file)
        left_out.update((entry.name, entry) for entry in others)
        values = _local_tensors(entries)
        total, wasted = storage_use(tensor for parts in values.values() for tensor in parts)
        ranks.storage_bytes += total
        ranks.wasted_bytes += wasted
        aliases = shared_windows({name: parts[0] for name, parts in values.items() if len(parts) == 1})
        if len(ranks.files) == 1:
            ranks.ties = aliases
        else:
            ranks.ties = {a: o for a, o in ranks.ties.items() if aliases.get(a) == o or _both_empty(values, a, o)}
    ranks.left_out = list(left_out.values())
    return ranks


def _local_tensors(entries: Mapping[str, AnyTensor]) -> dict[str, list[LazyTensor]]:
    values: dict[str, list[LazyTensor]] = {}
    for name, tensor in entries.items():
        if isinstance(tensor, ShardedTensor):
            values[name] = [shard.tensor for shard in tensor.local_shards]
        else:
            local = tensor.local if isinstance(tensor, DTensor) else tensor
            values[name] = [local] if isinstance(local, LazyTensor) else []
    return values


def _both_empty(values: Mapping[str, list[LazyTensor]], *names: str) -> bool:
    return all(name in values and not any(t.numel for t in values[name]) for name in names)


def _assemble_all(
    ranks: _Ranks, names: Mapping[str, str]
) -> tuple[dict[str, TensorSource], list[EqualSources], dict[str, str]]:
    known = ranks.tensors.tensors
    tensors: dict[str, TensorSource] = {}
    equal: list[EqualSources] = []
    ties = {a: o for a, o in ranks.ties.items() if same_description(known[a].first, known[o].first)}
    for name, short in names.items():
        source, checks = assemble(known.pop(name), ranks.tensors.world_size)
        if name in ties:
            continue
        tensors[short] = source
        equal.extend(checks)
    return tensors, equal, {names[alias]: names[owner] for alias, owner in ties.items()}


def _chosen_set(directory: Path, root: Path) -> tuple[RankSet, list[str]]:
    names = list_names(directory)
    sets = rank_sets(names)
    if not sets:
        raise IncompleteCheckpointError("the rank files are gone", file=directory)
    notes: list[str] = []
    declared = None
    if CONFIG_NAME in names:
        try:
            value = read_json_object(Path(checked_file(directory / CONFIG_NAME, root).path)).get("world_size")
        except (CorruptFileError, IncompleteCheckpointError):
            if len(sets) > 1:
                raise
            notes.append(f"{CONFIG_NAME} can't be read; the world size is taken from the file names")
        else:
            declared = value if type(value) is int else None
    chosen = choose_set(sets, declared, str(directory))
    if len(sets) > 1:
        others = ", ".join(str(s.world_size) for s in sets if s is not chosen)
        notes.append(
            f"rank files of world size {others} in the same directory are left out: {CONFIG_NAME} names {declared}"
        )
    return chosen, notes


def _check_one_save(directory: Path, root: Path, chosen: RankSet, files: Sequence[SourceFile]) -> None:
    check_one_step(directory, root, chosen)
    check_written_together(files)


def _missing_ranks(directory: Path, chosen: RankSet) -> IncompleteCheckpointError:
    missing = chosen.missing
    shown = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
    return IncompleteCheckpointError(
        "rank files are missing",
        file=directory,
        expected=f"model_world_size_{chosen.world_size}_rank_0 to {chosen.world_size - 1}",
        found=f"no file of rank {shown}",
        fix="wait until the save has finished, or copy the other nodes' rank files here",
    )


def _why_missing(directory: Path, root: Path, chosen: RankSet) -> CheckpointError:
    """Ranks are missing, or the names lie: the mesh inside may need none but those that are there."""
    rank, name = next(iter(chosen.names.items()))
    file = checked_file(directory / name, root)
    entries, _ = state_dict_entries(open_torch_file(file.path).value, file.path)
    groups = [t.mesh.group_of(rank) or () for t in entries.values() if isinstance(t, DTensor)]
    needed = {member for group in groups for member in group}
    if needed and needed <= set(chosen.names):
        return InconsistentCheckpointError(
            "the rank files' names speak of more ranks than the tensors inside were sharded over",
            file=file.path,
            expected=f"a mesh of {chosen.world_size} ranks, as the names say",
            found=f"a mesh of ranks {sorted(needed)}; no files of ranks {chosen.missing[:8]}",
            fix="if the files were renamed, give them back the names that the trainer wrote",
        )
    return _missing_ranks(directory, chosen)


def _config_dir(directory: Path, options: ReadOptions) -> Path | None:
    if options.config_dir is not None:
        return options.config_dir
    for candidate in (directory / MODEL_DIRECTORY, directory):
        if (candidate / "config.json").is_file():
            return candidate
    return None


def _consolidated(directory: Path) -> list[LeftOut]:
    """The model that a trainer saved for readers, beside the rank files."""
    names = [name for name in list_names(directory / MODEL_DIRECTORY) if name.endswith((".safetensors", ".bin"))]
    sizes = _sizes(directory / MODEL_DIRECTORY, names)
    reason = "the trainer's own copy of the model; the rank files are read instead"
    return [LeftOut(name=f"{MODEL_DIRECTORY}/{name}", reason=reason, nbytes=sizes.get(name, 0)) for name in names]


def _sizes(directory: Path, names: list[str]) -> dict[str, int]:
    sizes = {}
    for name in names:
        try:
            sizes[name] = (directory / name).stat().st_size
        except OSError:
            continue  # it vanished, or is a dangling link: its size is only shown, never used
    return sizes


def _step_of(location: Location) -> int | None:
    if location.global_step is not None:
        return location.global_step
    found = (STEP_DIRECTORY.search(part) for part in reversed(location.path.parts))
    return next((int(match.group(1)) for match in found if match), None)


def _one_line(error: CheckpointError) -> str:
    facts = [error.what, error.file and Path(error.file).name, error.found and str(error.found)]
    return ": ".join(str(fact) for fact in facts if fact)
