"""Names and places that follow from where a checkpoint lies: of its run, its model's work, and its model."""

from __future__ import annotations

import re
from pathlib import Path

from ckptflow.files.hidden import fitted, hidden_beside
from ckptflow.formats.base import Location
from ckptflow.formats.step_names import run_of, step_index

PLACEHOLDER = re.compile(r"\{(run|step|role)\}")
# The models that a run is about.
_USUAL_ROLES = ("actor", "policy")
# Signs of a name that mean something else in a file:// address, or that are dropped there.
_NOT_IN_FILE_ADDRESSES = re.compile(r"[%?#\x00-\x1f\x7f]")


def run_name(location: Location) -> str:
    """Name of the training run: the directory above the step directory; without one, the checkpoint's parent.

    A directory between the two that is called as a role, such as ``_actor/global_step5``, is not the run.
    """
    parts = location.path.parts
    step = step_index(parts)
    if step is None:
        return location.path.parent.name or "run"
    return run_of(parts, step) or "run"


def step_name(location: Location) -> str:
    """``step-10``; for a checkpoint without a step the name of its directory."""
    return location.path.stem if location.global_step is None else f"step-{location.global_step}"


def label_of(location: Location) -> str:
    """``my-run step-10``, for names and descriptions."""
    role = "" if location.role in (None, *_USUAL_ROLES) else f" {location.role}"
    return f"{run_name(location)} {step_name(location)}{role}"


def work_path(location: Location, work_dir: Path | None = None) -> Path:
    """Where a run makes the model: in ``work_dir``, or in ``.ckptflow`` in the directory of the training run."""
    return (work_dir or location.root.parent / ".ckptflow") / fitted(label_of(location).replace(" ", "-"))


def work_lock(out: Path) -> Path:
    """The lock of the run that makes the model at ``out``."""
    return hidden_beside(out, ".lock")


def destination_of(location: Location, destination_uri: str) -> str:
    """The URI for this checkpoint's model.

    ``{run}``, ``{step}`` and ``{role}`` in the destination are filled in. A destination without ``{step}`` holds many
    models: ``RUN/step-N`` is appended, and the role where it isn't a usual one (``actor``, ``policy``). The same
    checkpoint always gets the same URI, so that a second run finds what the first one published. On the Hub, where a
    repository holds one model per branch, ``@RUN/step-N`` is appended, unless the destination names a branch or tag.
    """
    role = location.role or "model"
    values = {"run": run_name(location), "step": step_name(location), "role": role}
    if destination_uri.startswith("file://"):
        values = {name: _in_file_address(value) for name, value in values.items()}
    if "{step}" in destination_uri:
        return PLACEHOLDER.sub(lambda m: values[m.group(1)], destination_uri)
    base = PLACEHOLDER.sub(lambda m: values[m.group(1)], destination_uri).rstrip("/")
    is_hub = base.startswith("hf://")
    if is_hub and "@" in base:
        return base
    parts = [] if "{run}" in destination_uri else [values["run"]]
    parts.append(values["step"])
    if role not in ("model", *_USUAL_ROLES) and "{role}" not in destination_uri:
        parts.append(values["role"])
    return base + ("@" if is_hub else "/") + "/".join(parts)


def _in_file_address(name: str) -> str:
    return _NOT_IN_FILE_ADDRESSES.sub(lambda sign: f"%{ord(sign.group()):02X}", name)
