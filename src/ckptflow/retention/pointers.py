"""What a run names as the step to load: trackers, ``latest`` files, links, and the Trainer's best checkpoint.

They are hints of the trainer to its next start; deleting what they name would make it fail or begin anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptflow.errors import CheckpointError
from ckptflow.files.jsonfiles import read_json_object
from ckptflow.formats.deepspeed_files import LATEST, LATEST_UNIVERSAL
from ckptflow.formats.run_tracker import TRACKER_NAME
from ckptflow.retention.units import StepUnit

TRAINER_STATE = "trainer_state.json"
# Lightning, NeMo and Keras write such files too; a name of a step in one is taken at its word.
TEXT_POINTERS = (TRACKER_NAME, LATEST, LATEST_UNIVERSAL, "last_checkpoint", "latest_checkpoint", "checkpoint")
_MAX_BYTES = 4096


def named_steps(run: Path, units: Sequence[StepUnit]) -> dict[Path, str]:
    """Path of a step of this run → what names it, for people.

    Args:
        run: the directory of the steps; pointers lie in it or right above it.
        units: its steps.
    """
    by_path = {os.path.realpath(unit.path): unit.path for unit in units}
    named: dict[Path, str] = {}
    for directory in (run, run.parent):
        for name, target in _links(directory):
            for real, path in by_path.items():
                if target == real or target.startswith(f"{real}{os.sep}"):
                    named.setdefault(path, f"the link {name} leads to it")
        for name in TEXT_POINTERS:
            for unit in _named_by_text(directory / name, units):
                named.setdefault(unit.path, f"{name} names it")
    for unit in _trainers_best(units):
        named.setdefault(unit.path, f"{TRAINER_STATE} names it as the best")
    return named


def _links(directory: Path) -> Iterator[tuple[str, str]]:
    try:
        with os.scandir(directory) as entries:
            links = [entry for entry in entries if entry.is_symlink()]
    except OSError:
        return  # gone, or not ours to read: then nobody follows links in it
    for entry in links:
        yield entry.name, os.path.realpath(entry.path)


def _named_by_text(path: Path, units: Sequence[StepUnit]) -> list[StepUnit]:
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return []
    if text.isdecimal():
        return [unit for unit in units if unit.global_step == int(text)]
    # A tag, or a path that ends in the step; "actor" in it may name a part of the step.
    parts = set(Path(text).parts) if text else set()
    return [unit for unit in units if unit.path.name in parts]


def _trainers_best(units: Sequence[StepUnit]) -> list[StepUnit]:
    """The step that the Trainer loads at the end (``load_best_model_at_end``), as its newest state names it."""
    for unit in sorted(units, key=lambda u: -1 if u.global_step is None else u.global_step, reverse=True):
        try:
            best = read_json_object(unit.path / TRAINER_STATE).get("best_model_checkpoint")
        except (CheckpointError, OSError):
            continue  # not the Trainer's, or half written: an older one may tell
        return [u for u in units if isinstance(best, str) and u.path.name == Path(best).name]
    return []
