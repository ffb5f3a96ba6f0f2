"""What changed under some directories: paths from inotify where the file system tells, silence where it can't.

Hints only: inotify drops events when its queue is full, and sees nothing of what other hosts write to a network file
system. Whoever needs to know has to look; ``ckptflow.discovery.watching`` does.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptflow.errors import UsageError

if TYPE_CHECKING:
    from watchfiles import Change

logger = logging.getLogger(__name__)

# inotify sees only what this host does. Names as in the third field from the end of /proc/self/mountinfo, proc(5).
NETWORK_FILE_SYSTEMS = frozenset(
    (
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
        "smbfs",
        "vboxsf",
        "virtiofs",
        "wekafs",
    )
)
MOUNTS = Path("/proc/self/mountinfo")
# Longest time for which inotify's events are gathered while they keep coming, and how long a pause ends it.
GATHER_MILLISECONDS, PAUSE_MILLISECONDS = 500, 50


def file_system_of(path: Path) -> str:
    """Name of the file system's type, such as ``ext4`` or ``nfs4``; empty where it can't be told."""
    try:
        device = path.stat().st_dev
        lines = MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        fields, _, kind = line.partition(" - ")
        if fields.split()[2] == wanted:
            return kind.split()[0]
    return ""


def is_networked(path: Path) -> bool:
    """Whether other hosts may write there without inotify telling."""
    kind = file_system_of(path)
    return kind in NETWORK_FILE_SYSTEMS or kind.startswith("fuse.")


class Changes:
    """Paths that changed under the roots. Survives roots that vanish and come back.

    Args:
        roots: directories; they need not exist yet.
        polling: never use inotify.

    Attributes:
        is_polling: changes happen without a hint, so that the roots have to be looked at often.

    Raises:
        UsageError: inotify is wanted and ``watchfiles`` is not installed.
    """

    def __init__(self, roots: Sequence[Path], *, polling: bool = False) -> None:
        self._roots = tuple(roots)
        self.is_polling = polling or any(is_networked(root) for root in roots)
        self._identities: dict[Path, tuple[int, int]] = {}
        self._events: Iterator[set[tuple[Change, str]]] | None = None
        if not self.is_polling:
            _require_watchfiles()

    def wait(self, seconds: float) -> set[Path] | None:
        """Paths that changed since the last call, after at most about ``seconds``; None: anything may have."""
        if self.is_polling:
            time.sleep(seconds)
            return set()
        # inotify holds on to a directory, not to its path: a root that was replaced has to be opened anew.
        now = {root: identity for root in self._roots if (identity := _identity(root)) is not None}
        is_new = now != self._identities
        if is_new:
            self._identities = now
            self._events = self._open(list(now), seconds) if now else None
        if self._events is None:
            time.sleep(seconds)
            return None if is_new else set()
        try:
            paths = {Path(path) for _, path in next(self._events)}
        except FileNotFoundError:
            self._identities = {}
            return None
        except (OSError, StopIteration) as error:
            logger.warning("inotify gave up (%s); looking at the directories from time to time instead", error)
            self.is_polling = True
            return None
        return None if is_new else paths

    def _open(self, roots: list[Path], seconds: float) -> Iterator[set[tuple[Change, str]]]:
        from watchfiles import watch

        return watch(
            *roots,
            watch_filter=None,
            debounce=GATHER_MILLISECONDS,
            step=PAUSE_MILLISECONDS,
            rust_timeout=max(1, round(seconds * 1000)),
            yield_on_timeout=True,
            ignore_permission_denied=True,
        )


def _identity(root: Path) -> tuple[int, int] | None:
    try:
        found = root.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _require_watchfiles() -> None:
    try:
        import watchfiles  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            "watching needs the package watchfiles", fix="pip install 'ckptflow[flow]', or --poll"
        ) from error
