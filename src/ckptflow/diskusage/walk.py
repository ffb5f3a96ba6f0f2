"""One walk over a tree that sums up sizes by run, step and kind of file; nothing is kept for a single file."""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ckptflow.files.kinds import KINDS, Kind, kind_of_directory, kind_of_file
from ckptflow.files.treesize import BLOCK_BYTES
from ckptflow.formats.registry import MAX_DEPTH
from ckptflow.formats.step_names import STEP_NAME

#: Files (and directories), apparent bytes and allocated bytes.
Numbers = list[int]


@dataclass(frozen=True, slots=True)
class _Place:
    """A directory on the way down.

    Attributes:
        path: where it is.
        depth: directories between it and the root.
        key: what its files are summed up under: its step's directory, or itself outside of steps.
        kind: what DCP files in it hold, where its name tells.
    """

    path: str
    depth: int
    key: str
    kind: Kind | None = None


class DiskWalk:
    """The sums of one walk.

    Attributes:
        sums: (run, step) → kind → numbers; the run is an absolute path, the step None for what lies beside the steps.
        unreadable: directories that can't be listed, and are not counted.
    """

    def __init__(self, root: str) -> None:
        """Walk over everything below ``root``; links are not followed, hard links are counted where first met."""
        self.unreadable: list[str] = []
        self._root = root
        self._sums: defaultdict[str, dict[Kind, Numbers]] = defaultdict(lambda: {kind: [0, 0, 0] for kind in KINDS})
        self._steps: dict[str, tuple[str, int]] = {}
        self._linked: set[tuple[int, int]] = set()
        self._walk()
        self.sums = self._labelled()

    def _walk(self) -> None:
        above = os.path.dirname(self._root)
        top = self._below(_Place(above, -1, above), os.path.basename(self._root))
        self._add(top.key, "other", os.lstat(self._root), is_directory=True)
        pending = [top]
        while pending:
            place = pending.pop()
            try:
                pending.extend(self._visit(place))
            except (FileNotFoundError, NotADirectoryError):
                continue  # deleted meanwhile
            except PermissionError:
                self.unreadable.append(place.path)

    def _visit(self, place: _Place) -> Iterator[_Place]:
        """Sum up the files of a directory; gives the directories in it."""
        inside = place.key in self._steps
        with os.scandir(place.path) as entries:
            for entry in entries:
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISDIR(found.st_mode):
                    below = self._below(place, entry.name)
                    self._add(below.key, "other", found, is_directory=True)
                    yield below
                    continue
                kind = kind_of_file(entry.name, place.kind)
                key = place.key if inside or kind == "other" else self._key_of_file(place, entry.name)
                self._add(key, kind, found)

    def _add(self, key: str, kind: Kind, found: os.stat_result, *, is_directory: bool = False) -> None:
        if found.st_nlink > 1 and not is_directory:
            inode = (found.st_dev, found.st_ino)
            if inode in self._linked:
                return
            self._linked.add(inode)
        numbers = self._sums[key][kind]
        numbers[0] += 1
        numbers[1] += 0 if is_directory else found.st_size
        numbers[2] += found.st_blocks * BLOCK_BYTES

    def _below(self, place: _Place, name: str) -> _Place:
        """A directory in ``place``: of the same step, the start of a step, or neither."""
        path, kind = os.path.join(place.path, name), kind_of_directory(name)
        outer = self._steps.get(place.key)
        match = STEP_NAME.search(name)
        if match is not None and (outer is None or (place.path == place.key and outer[1] != int(match.group(1)))):
            # A directory like ckpt-7b that holds the steps of others is a run and no step.
            self._steps.pop(place.key, None)
            self._steps[path] = (place.path, int(match.group(1)))
            return _Place(path, place.depth + 1, path, kind)
        outside = path if place.depth < MAX_DEPTH else place.key
        return _Place(path, place.depth + 1, place.key if outer else outside, kind or (place.kind if outer else None))

    def _key_of_file(self, place: _Place, name: str) -> str:
        """A file outside of step directories may be a step itself, as Lightning's are."""
        match = STEP_NAME.search(name)
        if match is None:
            return place.key
        path = os.path.join(place.path, name)
        self._steps[path] = (place.path, int(match.group(1)))
        return path

    def _labelled(self) -> dict[tuple[str, int | None], dict[Kind, Numbers]]:
        runs = {run for run, _ in self._steps.values()}
        merged: defaultdict[tuple[str, int | None], dict[Kind, Numbers]] = defaultdict(
            lambda: {kind: [0, 0, 0] for kind in KINDS}
        )
        for key, kinds in self._sums.items():
            total = merged[self._steps[key] if key in self._steps else (self._run_of(key, runs), None)]
            for kind, numbers in kinds.items():
                total[kind] = [a + b for a, b in zip(total[kind], numbers, strict=True)]
        return dict(merged)

    def _run_of(self, path: str, runs: set[str]) -> str:
        """The run around a directory outside of steps; where there is none, the directory right below the root."""
        above = path
        while len(above) >= len(self._root):
            if above in runs:
                return above
            if os.path.dirname(above) in (self._root, above):
                break
            above = os.path.dirname(above)
        return self._root if self._root in runs else above
