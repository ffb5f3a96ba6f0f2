"""All checkpoint layouts that ckptflow reads, and the way from a path to a checkpoint.

Adding a layout is one module in this package with a class that satisfies ``Format``, and one entry in ``FORMATS``.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from ckptflow.errors import AmbiguousCheckpointError, IncompleteCheckpointError, NotACheckpointError
from ckptflow.files.kinds import RECORD_NAME
from ckptflow.formats.base import Completeness, Format, Location, ReadOptions
from ckptflow.formats.dcp import DcpDirectory
from ckptflow.formats.dcp_hf import DcpHuggingFaceShards
from ckptflow.formats.deepspeed import DeepSpeedCheckpoint
from ckptflow.formats.files import list_names
from ckptflow.formats.fsdp import FsdpRankFiles
from ckptflow.formats.full_state_dict import FullStateDict
from ckptflow.formats.huggingface import HuggingFaceDirectory
from ckptflow.formats.lightning import LightningCheckpoint
from ckptflow.formats.megatron_dist import MegatronDistCheckpoint
from ckptflow.formats.megatron_legacy import MegatronLegacyCheckpoint
from ckptflow.formats.mxnet import MXNetParams
from ckptflow.formats.peft import PeftAdapter
from ckptflow.formats.peft_base import with_base_model
from ckptflow.formats.side_files import damaged_side_file
from ckptflow.formats.step_names import STEP_NAME, global_step_of, role_of
from ckptflow.formats.verdicts import refused, unless_marked
from ckptflow.formats.zero_tails import unless_growing, zero_tail_notes
from ckptflow.manifest import CheckpointManifest
from ckptflow.processes.collector import without_gc

FORMATS: tuple[Format, ...] = (
    FsdpRankFiles(),
    PeftAdapter(),
    DcpHuggingFaceShards(),
    DcpDirectory(),
    DeepSpeedCheckpoint(),
    LightningCheckpoint(),
    FullStateDict(),
    MXNetParams(),
    MegatronDistCheckpoint(),
    MegatronLegacyCheckpoint(),
    HuggingFaceDirectory(),
)

# Names that writers use while they are not done, and our own work directories.
UNFINISHED_NAME = re.compile(r"^\.|^tmp[-_.]|[-_.](?:tmp|temp|partial|incomplete|deleting)$|\.tmp[-_.]?\d*$")
# AReaL's checkpoints/USER/EXPERIMENT/TRIAL/default/STEP, and NeMo-RL's STEP/policy/weights/iter_0000000 in results.
MAX_DEPTH = 7

_log = logging.getLogger(__name__)


def format_of(layout: str) -> Format:
    """The format with that layout name."""
    return next(fmt for fmt in FORMATS if fmt.layout == layout)


def find_at(path: Path) -> list[Location]:
    """Checkpoints exactly at ``path``; a layout that another one supersedes there is left out."""
    found = [(fmt, location) for fmt in FORMATS for location in fmt.find(path)]
    hidden = {name for fmt, _ in found for name in fmt.supersedes}
    locations = [location for _, location in found if location.layout not in hidden]
    return [_named(location) for location in locations]


def _named(location: Location) -> Location:
    """With the step and the role that names tell, where the format itself knows none."""
    step, role = location.global_step, location.role
    return replace(
        location,
        global_step=global_step_of(location.path) if step is None else step,
        role=role_of(location.path) if role is None else role,
    )


def find_below(root: Path, depth: int = MAX_DEPTH) -> Iterator[Location]:
    """All checkpoints at or below ``root``, down to ``depth`` directories; a checkpoint's inside is not searched.

    Directories under unfinished names (``tmp-checkpoint-5``, dot directories) are skipped; ones that vanish
    meanwhile too, and below ``root`` ones that can't be read, which the log tells. A model that ckptflow made is a
    checkpoint only where it is named itself.
    """
    found = find_at(root)
    yield from found or _find_inside(root, depth)


def _find_inside(directory: Path, depth: int) -> Iterator[Location]:
    if depth == 0:
        return
    try:
        with os.scandir(directory) as entries:
            names = []
            for entry in entries:
                if entry.is_symlink():
                    tell_link(entry.path)
                elif entry.is_dir() and not UNFINISHED_NAME.search(entry.name):
                    names.append(entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in sorted(names, key=natural_key):
        try:
            found = find_unnamed(directory / name) or list(_find_inside(directory / name, depth - 1))
        except PermissionError as error:
            _log.warning("%s: not looked at: %s", directory / name, error.strerror)
            continue
        yield from found


@lru_cache(maxsize=1024)
def tell_link(path: str) -> None:
    """Say, once, that what a link leads to is not looked at, where that is a run elsewhere.

    Links of trainers, such as ``latest``, lead to a step beside them, and those to datasets and base models to no step.
    """
    try:
        target, parent = os.path.realpath(path, strict=True), os.path.realpath(os.path.dirname(path))
        is_elsewhere = not Path(target).is_relative_to(parent)
        holds_steps = is_elsewhere and any(STEP_NAME.search(name) for name in os.listdir(target))
    except OSError:
        return  # it leads nowhere, to a file, or where we may not look
    if holds_steps:
        _log.warning("%s: a link to %s, which is not looked at: name that as a root too", path, target)


def find_unnamed(path: Path) -> list[Location]:
    """As ``find_at``, of what nobody named: what ckptflow made of a checkpoint is none, or it would be made again."""
    return [] if (path / RECORD_NAME).is_file() else find_at(path)


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Sort key under which step_9000 comes before step_10000."""
    parts = re.split(r"(\d+)", name)
    return [(1, int(part)) if part.isdecimal() else (0, part) for part in parts if part]


def locate(path: Path) -> Location:
    """The one checkpoint that ``path`` means: a checkpoint itself, its step directory, or a run with one step.

    Raises:
        NotACheckpointError: nothing is there, or nothing that a format knows.
        AmbiguousCheckpointError: several checkpoints; the message lists them.
    """
    path = Path(os.path.abspath(path))
    if not path.exists():
        raise NotACheckpointError("no such file or directory", file=path, fix="check the path")
    found = list(find_below(path))
    preferred = [location for location in found if location.preferred]
    for choice in (found, preferred):
        if len(choice) == 1:
            return choice[0]
    if not found:
        raise NotACheckpointError(
            "no known checkpoint layout here",
            file=path,
            expected="one of the layouts " + ", ".join(fmt.layout for fmt in FORMATS),
            found=_listing(path),
            fix=_advice(path),
        )
    choices = "\n    ".join(f"{location.path} ({location.layout})" for location in found)
    apart = len({location.path for location in found}) > 1
    fix = "name one of them" if apart else "files of two kinds of checkpoints are mixed here: move one kind away"
    raise AmbiguousCheckpointError(
        f"{len(found)} checkpoints at this path", file=path, found=f"\n    {choices}", fix=fix
    )


def _advice(path: Path) -> str:
    """A torch file may be anything: it is a checkpoint where a person says so."""
    files = [name for name in sorted(list_names(path), key=natural_key) if find_at(path / name)]
    if not files:
        return "name the directory that holds the weight files"
    others = f" or another of {len(files)} files" if len(files) > 1 else ""
    return f"if one file holds the whole model, name it itself: {files[0]}{others}"


def _listing(path: Path, limit: int = 8) -> str:
    if not path.is_dir():
        return f"a file of {path.stat().st_size} bytes"
    names = sorted(os.listdir(path), key=natural_key)
    shown = ", ".join(names[:limit]) or "nothing"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def check(location: Location) -> Completeness:
    """Whether the checkpoint is whole."""
    try:
        verdict = unless_marked(format_of(location.layout).check(location), location.path)
        damage = damaged_side_file(location.path, location.root) if verdict.state == "complete" else None
        return unless_growing(verdict, location.path) if damage is None else refused(damage, location.path)
    except (FileNotFoundError, NotADirectoryError) as error:
        return Completeness(state="incomplete", reason=f"{Path(str(error.filename)).name} vanished while it was read")
    except OSError as error:
        return Completeness(state="incomplete", reason=f"{Path(str(error.filename)).name}: {error.strerror or error}")


def read(location: Location, options: ReadOptions) -> CheckpointManifest:
    """Describe the checkpoint's tensors.

    Raises:
        CheckpointError: it is refused; also where the trainer deletes it meanwhile.
    """
    try:
        with without_gc():
            manifest = with_base_model(format_of(location.layout).read(location, options), options)
        return replace(manifest, notes=(*manifest.notes, *zero_tail_notes(manifest.files)))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise IncompleteCheckpointError("a file vanished while it was read", file=error.filename) from error
    except OSError as error:
        raise IncompleteCheckpointError(
            "a file of the checkpoint can't be read", file=error.filename, found=error.strerror or error
        ) from error
