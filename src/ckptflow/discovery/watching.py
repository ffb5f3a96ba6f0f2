"""Which checkpoints became complete since the last look.

Hints say where to look at once; a look at everything, from time to time, finds what they missed. Memory of earlier
looks makes that cheap: an unchanged directory is only listed, and a checkpoint is parsed again only when its files
changed. Nothing is kept on disk: after a restart everything is looked at, and whoever acts on it sees at the
destination what is done.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptflow.discovery.changes import Changes
from ckptflow.discovery.discover import FoundCheckpoint, by_step, judge
from ckptflow.discovery.signatures import Directory, Signature, read_tree, signature_of
from ckptflow.formats.base import Location
from ckptflow.formats.registry import MAX_DEPTH, UNFINISHED_NAME, find_at, find_unnamed
from ckptflow.formats.step_names import STEP_NAME

# inotify tells of each write, so that a short silence means something. On a network file system sizes and times are
# seen late, by up to the minute that clients cache attributes.
SETTLE_SECONDS, SETTLE_SECONDS_POLLING = 2.0, 30.0
POLL_SECONDS, RESCAN_SECONDS = 10.0, 60.0
TICK_SECONDS = 0.25
# A look at everything takes at most this share of the time, however many directories there are.
SCAN_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyCheckpoint:
    """A complete checkpoint, and the bytes of its files."""

    found: FoundCheckpoint
    nbytes: int

    @property
    def location(self) -> Location:
        """Where it is."""
        return self.found.location


@dataclass(slots=True, kw_only=True)
class _Known:
    signature: Signature
    since: float
    given: bool = False


class Watcher:
    """Gives each checkpoint once when it is complete, and once more when its files were changed after that.

    Args:
        roots: runs, step directories, or directories that hold runs; they need not exist yet.
        settle_seconds: time without a change before a checkpoint counts as complete; seen in the files' times, or by
            this watcher itself where the clock of a file server is wrong.
        clock: seconds since the epoch.
    """

    def __init__(self, roots: Iterable[Path], *, settle_seconds: float, clock: Callable[[], float] = time.time) -> None:
        self._roots = tuple(Path(os.path.abspath(root)) for root in roots)
        self._settle = settle_seconds
        self._clock = clock
        self._known: dict[Path, _Known] = {}
        self._found: dict[str, tuple[Signature, tuple[Location, ...]]] = {}
        self._due: dict[Path, float] = {}
        self._pause = 0.0

    def look_everywhere(self) -> list[ReadyCheckpoint]:
        """Look at all roots; oldest step first."""
        seen: dict[str, Signature] = {}
        locations = [location for root in self._roots for location in self._survey(root, MAX_DEPTH, seen)]
        self._found = {path: entry for path, entry in self._found.items() if path in seen}
        paths = {location.path for location in locations}
        self._known = {path: known for path, known in self._known.items() if path in paths}
        return self._ready(locations, seen)

    def look_at(self, changed: Iterable[Path]) -> list[ReadyCheckpoint]:
        """Look where something changed, and at what was to be looked at again by now; oldest step first."""
        now = self._clock()
        hinted = {unit for path in changed for unit in self._unit_of(path)}
        due = {path for path, when in self._due.items() if when <= now}
        steps = {unit for unit in hinted if STEP_NAME.search(unit.name)}
        for path in due:
            del self._due[path]
        for unit in steps:
            # Once more later: files that were written before inotify knew of a new directory gave no hint.
            self._due[unit] = now + self._settle
        for unit in hinted - steps:
            # It may hold thousands of steps, and a log that grows all the time.
            self._due.setdefault(unit, now + max(self._settle, self._pause))
        seen: dict[str, Signature] = {}
        started = time.monotonic()
        locations = [location for unit in steps | due for location in self._locate(unit, seen)]
        self._pause = (time.monotonic() - started) / SCAN_SHARE if due - steps else self._pause
        return self._ready(locations, seen)

    def _unit_of(self, path: Path) -> Iterator[Path]:
        """The step directory that a path is in, else the root's entry; nothing for names in the making."""
        for root in self._roots:
            if not path.is_relative_to(root) or path == root:
                continue
            parts = path.relative_to(root).parts
            steps = [index for index, part in enumerate(parts) if STEP_NAME.search(part)]
            inner = parts[: steps[0] + 1] if steps else parts[:1]
            if not any(UNFINISHED_NAME.search(part) for part in inner):
                yield root.joinpath(*inner)

    def _locate(self, unit: Path, seen: dict[str, Signature]) -> list[Location]:
        """Checkpoints at or below ``unit``, or the one above that it belongs to, as a look from the root finds them."""
        root = next((root for root in self._roots if unit.is_relative_to(root)), None)
        if root is None:
            return []
        directory, parts = root, unit.relative_to(root).parts
        for part in parts:
            found = self._find_at(directory)
            if found:
                return found
            directory = directory / part
        return self._survey(directory, MAX_DEPTH - len(parts), seen) if directory.is_dir() else find_at(directory)

    def _find_at(self, directory: Path) -> list[Location]:
        try:
            return find_at(directory) if directory in self._roots else find_unnamed(directory)
        except PermissionError:
            return []

    def _survey(self, directory: Path, depth: int, seen: dict[str, Signature]) -> list[Location]:
        tree = read_tree(str(directory), seen)
        return [] if tree is None else list(self._find(tree, depth))

    def _find(self, directory: Directory, depth: int) -> tuple[Location, ...]:
        """As ``registry.find_below``, but for what has changed only."""
        known = self._found.get(directory.path)
        if known is not None and known[0] == directory.signature:
            return known[1]
        locations = tuple(self._find_at(Path(directory.path)))
        if not locations and depth > 0:
            locations = tuple(found for child in directory.children for found in self._find(child, depth - 1))
        self._found[directory.path] = (directory.signature, locations)
        return locations

    def _ready(self, locations: Iterable[Location], seen: dict[str, Signature]) -> list[ReadyCheckpoint]:
        now = self._clock()
        ready = {}
        for location in locations:
            signature = seen.get(str(location.path)) or signature_of(location.path)
            found = None if signature is None else self._judge(location, signature, now)
            if found is not None and signature is not None:
                ready[location.path] = ReadyCheckpoint(found=found, nbytes=signature.nbytes)
        return [ready[found.location.path] for found in by_step(each.found for each in ready.values())]

    def _judge(self, location: Location, signature: Signature, now: float) -> FoundCheckpoint | None:
        known = self._known.get(location.path)
        if known is None or known.signature != signature:
            known = self._known[location.path] = _Known(signature=signature, since=now)
        if known.given:
            return None
        is_quiet = now - known.since >= self._settle
        # Not 0 where it was quiet: the file server's clock may be ahead of ours.
        found = judge(location, -math.inf if is_quiet else self._settle, now)
        if found is None:
            del self._known[location.path]
            return None
        if found.state == "complete":
            known.given = True
            self._due.pop(location.path, None)
            return found
        if found.state == "in-progress":
            settled = min(found.newest_mtime, known.since) + self._settle
            self._due[location.path] = settled if settled > now else now + max(self._settle, 1.0)
        return None


def watch(
    roots: Sequence[Path],
    *,
    settle_seconds: float | None = None,
    polling: bool = False,
    poll_seconds: float = POLL_SECONDS,
    rescan_seconds: float = RESCAN_SECONDS,
    tick_seconds: float = TICK_SECONDS,
) -> Iterator[list[ReadyCheckpoint]]:
    """Newly complete checkpoints, for ever; an empty list about every ``tick_seconds`` in which there was none.

    Args:
        roots: directories to watch.
        settle_seconds: see ``Watcher``; None takes 2 s with inotify and 30 s without.
        polling: don't use inotify. It is not used on network file systems anyway.
        poll_seconds: time between looks at everything where inotify does not help.
        rescan_seconds: the same where it does.
        tick_seconds: longest wait for hints.

    Raises:
        UsageError: ``watchfiles`` is not installed and ``polling`` was not asked.
    """
    roots = [Path(os.path.abspath(root)) for root in roots]
    changes = Changes(roots, polling=polling)
    if settle_seconds is None:
        settle_seconds = SETTLE_SECONDS_POLLING if changes.is_polling else SETTLE_SECONDS
    watcher = Watcher(roots, settle_seconds=settle_seconds)
    next_scan = 0.0
    while True:
        # The first call opens inotify, before the first look at everything: nothing falls between the two.
        changed = changes.wait(tick_seconds)
        started = time.monotonic()
        if changed is not None and started < next_scan:
            yield watcher.look_at(changed)
            continue
        ready = watcher.look_everywhere()
        ended = time.monotonic()
        next_scan = ended + max(poll_seconds if changes.is_polling else rescan_seconds, (ended - started) / SCAN_SHARE)
        yield ready
