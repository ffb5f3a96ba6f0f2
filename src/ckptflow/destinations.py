"""Names and places that follow from where a checkpoint lies: of its run, its model's work, and its model."""

from __future__ import annotations

import re
from pathlib import Path

from ckptflow.formats.base import Location
from ckptflow.hidden import fitted, hidden_beside

PLACEHOLDER = re.compile(r"\{(run|step|role)\}")
# Signs of a name that mean something else in a file:// address, or that are dropped there.
_NOT_IN_FILE_ADDRESSES = re.compile(r"[%?#\x00-\x1f\x7f]")


def run_name(location: Location) -> str:
    """Name of the training run: the directory above the step directory; without one, the checkpoint's parent."""
    from ckptflow.formats.registry import STEP_NAME  # brings in all readers, which an upload has no use for

    parts = location.path.parts
    for index in range(len(parts) - 1, 0, -1):
        if STEP_NAME.search(parts[index]):
            parents = [p for p in parts[1:index] if p not in ("checkpoint", "checkpoints")]
            return parents[-1] if parents else "run"
    return location.path.parent.name or "run"


def step_name(location: Location) -> str:
    """``step-10``; for a checkpoint without a step the name of its directory."""
    return location.path.stem if location.global_step is None else f"step-{location.global_step}"


def label_of(location: Location) -> str:
    """``my-run step-10``, for names and descriptions."""
    role = "" if location.role in (None, "actor") else f" {location.role}"
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
    models: ``RUN/step-N`` is appended, and the role where it isn't the only or usual one (``actor``). The same
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
    if role not in ("model", "actor") and "{role}" not in destination_uri:
        parts.append(values["role"])
    return base + ("@" if is_hub else "/") + "/".join(parts)


def _in_file_address(name: str) -> str:
    return _NOT_IN_FILE_ADDRESSES.sub(lambda sign: f"%{ord(sign.group()):02X}", name)
