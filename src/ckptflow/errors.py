"""Everything that ckptflow raises on purpose.

CkptflowError
├── UsageError               the request itself is wrong: options that contradict, a path that does not exist
├── CheckpointError          the checkpoint is refused; running again on the same bytes gives the same answer
│   ├── NotACheckpointError      no known layout at this path
│   ├── AmbiguousCheckpointError several checkpoints at this path: the message lists them
│   ├── IncompleteCheckpointError files are missing, short, or still being written: later it may be complete
│   ├── CorruptFileError         a file does not parse, or contradicts itself
│   ├── UnsafeFileError          a file asks for more than data: foreign code, paths outside, absurd sizes
│   ├── InconsistentCheckpointError  files contradict each other: overlap, gap, mixed steps, ties that differ
│   ├── UnsupportedCheckpointError   the format says something that ckptflow can't merge, by name
│   └── SourceChangedError       a source file changed while it was read
├── ValueRefusedError        values that must not be published: NaN, Inf, overflow in the cast
├── DeviceError              a GPU that was asked for is missing, full, or casts other bytes than the CPU
├── HelperError              a process that worked for this one died; nothing is known of what it worked on
├── OutputError              the destination directory can't be written or holds something else
├── VerificationError        the output is not what the source says
└── PublishError             the store refused or lost an upload
    ├── TransientPublishError    may heal: throttling, dropped connections, 5xx
    └── PermanentPublishError    will not heal by itself: credentials, permission, quota
        └── DestinationTakenError    something else is there; only a person can say what is to become of it

A message has five parts, in this order, each only where it applies: what is wrong, file, tensor,
expected and found, what to do. ``CkptflowError`` renders them, so that callers pass facts and not prose.
"""

from __future__ import annotations

from os import PathLike


class CkptflowError(Exception):
    """Base of all errors that ckptflow raises on purpose.

    Args:
        what: one sentence, no full stop at the end.
        file: the file or directory that is at fault.
        tensor: the FQN of the tensor at fault.
        expected: what should have been there.
        found: what is there.
        fix: what a person can do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        file: str | PathLike[str] | None = None,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
        fix: str | None = None,
    ) -> None:
        self.what = what
        self.file = None if file is None else str(file)
        self.tensor = tensor
        self.expected = expected
        self.found = found
        self.fix = fix
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        for label, value in (
            ("file", self.file),
            ("tensor", self.tensor),
            ("expected", self.expected),
            ("found", self.found),
            ("what to do", self.fix),
        ):
            if value is not None:
                lines.append(f"  {label}: {value}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Prefect and process pools pickle exceptions; keyword-only arguments need this to survive.
        facts = {name: getattr(self, name) for name in ("file", "tensor", "expected", "found", "fix")}
        return (_rebuild, (type(self), self.what, facts))


def _rebuild(kind: type[CkptflowError], what: str, facts: dict[str, object]) -> CkptflowError:
    return kind(what, **facts)  # type: ignore[arg-type]


class UsageError(CkptflowError):
    """The request is wrong whatever the checkpoint says."""


class CheckpointError(CkptflowError):
    """The checkpoint is refused."""


class NotACheckpointError(CheckpointError):
    """No known layout at this path."""


class AmbiguousCheckpointError(CheckpointError):
    """Several checkpoints at this path."""


class IncompleteCheckpointError(CheckpointError):
    """Files are missing, short, or still being written."""


class CorruptFileError(CheckpointError):
    """A file does not parse, or contradicts itself."""


class UnsafeFileError(CheckpointError):
    """A file asks for more than data."""


class InconsistentCheckpointError(CheckpointError):
    """Files of one checkpoint contradict each other."""


class UnsupportedCheckpointError(CheckpointError):
    """The format says something that ckptflow can't merge."""


class SourceChangedError(CheckpointError):
    """A source file changed while it was read."""


class ValueRefusedError(CkptflowError):
    """Values that must not be published."""


class DeviceError(CkptflowError):
    """A device that was asked for can't be used. The same work on the CPU gives the same bytes."""


class HelperError(CkptflowError):
    """A process that worked for this one died, for want of memory perhaps. Another try may end well."""


class OutputError(CkptflowError):
    """The output directory can't be written or holds something else."""


class VerificationError(CkptflowError):
    """The output is not what the source says."""


class PublishError(CkptflowError):
    """The store refused or lost an upload."""


class TransientPublishError(PublishError):
    """May heal by itself."""


class PermanentPublishError(PublishError):
    """Will not heal by itself."""


class DestinationTakenError(PermanentPublishError):
    """The destination holds something else than this model."""
