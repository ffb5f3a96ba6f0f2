"""What a checkpoint format has to tell: where it is, whether it is complete, and what is in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from ckptflow.manifest import CheckpointManifest

State = Literal["complete", "incomplete", "in-progress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """One checkpoint on disk, found by names alone.

    Attributes:
        layout: the format's name.
        path: directory or file that holds the weights; what a person would pass to ``inspect``.
        root: no file outside this directory is ever read; the step directory where there is one.
        global_step: optimizer steps done, from directory or file names; None where they don't tell.
        role: ``actor``, ``critic`` or another part of the step directory; None where there is just one.
        preferred: the one that the trainer itself would resume from, where a directory holds several.
    """

    layout: str
    path: Path
    root: Path
    global_step: int | None = None
    role: str | None = None
    preferred: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Completeness:
    """Whether a checkpoint can be read now.

    Attributes:
        state: ``incomplete`` is missing something; ``in-progress`` shows signs of a writer still at work.
        reason: what is missing, or what proves completeness, for people.
    """

    state: State
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What a person adds to a checkpoint that does not tell all.

    Attributes:
        config_dir: directory with config.json and tokenizer files, where the trainer left none.
        base_model: directory of the base model of an adapter.
    """

    config_dir: Path | None = None
    base_model: Path | None = None


class Format(Protocol):
    """One layout. Implementations are stateless, one module each, and are listed in ``formats.registry.FORMATS``.

    Attributes:
        layout: the layout's name, such as ``fsdp``.
        supersedes: layouts that may be found at the same path and are then a lesser view of the same checkpoint, such
            as the 16-bit copy beside DeepSpeed's masters. Two layouts at one path are ambiguous otherwise.
    """

    layout: str
    supersedes: tuple[str, ...]

    def find(self, path: Path) -> list[Location]:
        """Checkpoints of this layout exactly at ``path`` (a directory or a file), by names and a few bytes alone.

        Does not look into step directories or roles below ``path``; ``formats.registry.locate`` does that. Cheap: one
        directory listing or two. A half-written checkpoint is found too. Never raises for foreign content or for
        files that vanish. ``layout``, ``path`` and ``role`` are set; ``global_step`` only where the format knows it
        better than directory names do.
        """
        ...

    def check(self, location: Location) -> Completeness:
        """Whether the checkpoint is whole, from names, sizes and file structure; reads no tensor data.

        Survives files that vanish or grow meanwhile (then it is ``in-progress`` or ``incomplete``).
        """
        ...

    def read(self, location: Location, options: ReadOptions) -> CheckpointManifest:
        """Describe every tensor; reads metadata only.

        Raises:
            IncompleteCheckpointError: something is missing or short.
            CheckpointError: any other subclass: the checkpoint is refused.
        """
        ...
