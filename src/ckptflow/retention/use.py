"""Who uses a step right now: runs of ckptflow that hold a lock, and processes of this host with a file of it open.

Other hosts that read over a network file system are not seen, except by the locks of the directory where they work
(``.ckptflow`` beside the steps, unless they were given another one).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ckptflow.discovery.destinations import work_lock, work_path
from ckptflow.files.locks import is_held, is_in_use
from ckptflow.retention.units import StepUnit

_PROC = Path("/proc")


def users(units: Sequence[StepUnit]) -> dict[Path, str]:
    """Path of a step → who uses it, for people; steps that nobody is seen to use are left out.

    Raises:
        OutputError: a lock can't be asked.
    """
    found: dict[Path, str] = {}
    roots = {os.path.realpath(unit.path): unit.path for unit in units}
    for name, pid in _open_files():
        for parent in (name, *_parents(name)):
            if parent in roots:
                found.setdefault(roots[parent], f"process {pid} has {os.path.basename(name)} open")
    # A conversion's lock tells where it writes, not what it reads: while one writes into a run, no step of it goes.
    by_run = {run: _held(_conversion_locks(run)) for run in {unit.run for unit in units}}
    for unit in units:
        lock = by_run[unit.run] or _held(_locks(unit))
        if lock is not None:
            found[unit.path] = f"a run of ckptflow holds {lock}"
        elif any(is_in_use(path) for path in _paths(unit)):
            found[unit.path] = "a run of ckptflow reads it"
    return found


def _held(locks: Iterator[Path]) -> Path | None:
    return next((path for path in locks if is_held(path)), None)


def _conversion_locks(directory: Path) -> Iterator[Path]:
    return directory.glob(".*.ckptflow/lock")


def _locks(unit: StepUnit) -> Iterator[Path]:
    """Locks of work on a step: of the flow, by the step's name, and of conversions into it."""
    for each in unit.checkpoints:
        yield work_lock(work_path(each.location))
    for path in _paths(unit):
        yield from _conversion_locks(path)


def _paths(unit: StepUnit) -> Iterable[Path]:
    return dict.fromkeys((unit.path, *(each.location.path for each in unit.checkpoints)))


def _open_files() -> Iterator[tuple[str, str]]:
    """Path and process id of each open or mapped file of the processes that we may look into, but our own."""
    own = str(os.getpid())
    try:
        processes = [name for name in os.listdir(_PROC) if name.isdecimal() and name != own]
    except OSError:
        return  # not Linux
    for pid in processes:
        for name in {*_descriptors(pid), *_mappings(pid)}:
            yield name, pid


def _descriptors(pid: str) -> Iterator[str]:
    directory = f"{_PROC}/{pid}/fd"
    try:
        numbers = os.listdir(directory)
    except OSError:
        return  # ended, or another user's
    for number in numbers:
        try:
            target = os.readlink(f"{directory}/{number}")
        except OSError:
            continue  # closed meanwhile
        if target.startswith("/"):
            yield target


def _mappings(pid: str) -> Iterator[str]:
    try:
        text = (_PROC / pid / "maps").read_text("utf-8", "surrogateescape")
    except OSError:
        return  # ended, or another user's
    for line in text.splitlines():
        # proc(5): address, permissions, offset, device, inode, path.
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            yield fields[5]


def _parents(name: str) -> Iterator[str]:
    while name != "/":
        name = os.path.dirname(name)
        yield name
