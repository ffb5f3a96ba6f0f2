"""The model that config.json describes: its tensors' names and shapes, and how transformers would load others.

transformers is asked in a process of its own: its import takes seconds and hundreds of megabytes, and a config from
outside may describe a model of absurd size. Nothing is allocated (meta device) and no code from the directory is run.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptflow.errors import IncompleteCheckpointError, VerificationError
from ckptflow.files.jsonfiles import MAX_JSON_BYTES
from ckptflow.processes.askprocess import ask
from ckptflow.tensors import Shape

SKELETON_TIMEOUT_SECONDS = 180

TensorHeaders = Mapping[str, tuple[str, Shape]]
"""Name → (dtype name, shape)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What ``from_pretrained`` says to a set of tensors, under all the renamings that it knows.

    Attributes:
        missing: parameters and buffers of the model that no tensor fills; ties are not among them.
        unexpected: tensors that the model has no use for.
        mismatched: name → (shape in the file, shape in the model).
        errors: what went wrong while tensors were stacked, split or renamed.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A model without values.

    Attributes:
        architecture: the transformers class.
        shapes: names as ``save_pretrained`` writes them → shapes; empty where ``unavailable``.
        live_names: names in the living module, which may differ from those in files.
        live_shapes: the same with their shapes, where they do differ.
        buffers: the names in ``live_names`` that are persistent buffers.
        tied: alias → owner, in names of the living module.
        float32: globs of parts of names that transformers computes with in float32, whatever the model's dtype.
        unavailable: why the model can't be built, for people; None where it was.
        refused: it can't be built because transformers finds the config itself wrong.
        loading: how the given tensors would be loaded; None where none were given, or ``not_loaded`` says why.
        not_loaded: why this machine can't try to load tensors, for people.
        notes: what a person should know.
    """

    architecture: str = ""
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    live_names: frozenset[str] = frozenset()
    live_shapes: Mapping[str, Shape] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    tied: Mapping[str, str] = field(default_factory=dict)
    float32: tuple[str, ...] = ()
    unavailable: str | None = None
    refused: bool = False
    loading: Loading | None = None
    not_loaded: str | None = None
    notes: tuple[str, ...] = ()


_known: dict[str, Skeleton] = {}


def describe_model(
    config_dir: Path, tensors: TensorHeaders | None = None, timeout_seconds: float = SKELETON_TIMEOUT_SECONDS
) -> Skeleton:
    """The model that ``config_dir/config.json`` describes; equal questions are answered from memory.

    Args:
        config_dir: directory with config.json.
        tensors: tensors to try to load into the model; their values are not needed.
        timeout_seconds: bound on the helper process.

    Raises:
        VerificationError: the helper process died or gave no answer in time.
        IncompleteCheckpointError: there is no config.json.
    """
    question = json.dumps(None if tensors is None else {k: [d, list(s)] for k, (d, s) in tensors.items()})
    key = hashlib.sha256(_config_bytes(config_dir) + b"\0" + question.encode()).hexdigest()
    if key not in _known:
        _known[key] = _from_json(
            ask("ckptflow.validate.skeleton", config_dir, question, timeout_seconds, VerificationError)
        )
    return _known[key]


def _config_bytes(config_dir: Path) -> bytes:
    try:
        with open(config_dir / "config.json", "rb") as file:
            return file.read(MAX_JSON_BYTES)
    except OSError as error:
        raise IncompleteCheckpointError(
            "config.json can't be read",
            file=config_dir / "config.json",
            found=error.strerror,
            fix="name the directory with the model's config.json with --config",
        ) from error


def _from_json(answer: Mapping[str, Any]) -> Skeleton:
    loading = answer.get("loading")
    return Skeleton(
        architecture=answer.get("architecture", ""),
        shapes={name: tuple(shape) for name, shape in answer.get("shapes", {}).items()},
        live_names=frozenset(answer.get("live_names", ())),
        live_shapes={name: tuple(shape) for name, shape in answer.get("live_shapes", {}).items()},
        buffers=frozenset(answer.get("buffers", ())),
        tied=answer.get("tied", {}),
        float32=tuple(answer.get("float32", ())),
        unavailable=answer.get("unavailable"),
        refused=bool(answer.get("refused")),
        not_loaded=answer.get("not_loaded"),
        notes=tuple(answer.get("notes", ())),
        loading=None
        if loading is None
        else Loading(
            missing=tuple(loading["missing"]),
            unexpected=tuple(loading["unexpected"]),
            mismatched={name: (tuple(a), tuple(b)) for name, a, b in loading["mismatched"]},
            errors=tuple(loading["errors"]),
        ),
    )


if __name__ == "__main__":
    from ckptflow.validate.skeleton_process import main

    sys.exit(main(sys.argv[1:]))
