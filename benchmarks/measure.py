"""Run whole processes and measure them: wall, CPU, peak memory, and what else the machine was doing."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one command.

    Attributes:
        wall_seconds: from spawn to exit.
        user_seconds: CPU in user mode, children included.
        system_seconds: CPU in the kernel, children included.
        peak_bytes: largest ``ru_maxrss`` of the process.
        watermark_bytes: last ``VmHWM`` seen while it ran; 0 if it was too quick to be seen.
        other_cores: cores that other processes used meanwhile.
    """

    wall_seconds: float
    user_seconds: float
    system_seconds: float
    peak_bytes: int
    watermark_bytes: int
    other_cores: float


def run(command: Sequence[str], log: Path) -> Run:
    """Run a command to its end; its output goes to ``log``.

    This process must stay small: until a child's exec, the child's peak memory is its parent's.
    """
    busy = _busy_seconds()
    begin = time.monotonic()
    with log.open("wb") as output:
        actions = [(os.POSIX_SPAWN_DUP2, output.fileno(), 1), (os.POSIX_SPAWN_DUP2, output.fileno(), 2)]
        pid = os.posix_spawnp(command[0], list(command), environment(), file_actions=actions)
    watermark = 0
    while True:
        watermark = _watermark_bytes(pid) or watermark
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            break
        time.sleep(POLL_SECONDS)
    wall = time.monotonic() - begin
    if status != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text(errors='replace')}")
    own = usage.ru_utime + usage.ru_stime
    return Run(
        wall_seconds=wall,
        user_seconds=usage.ru_utime,
        system_seconds=usage.ru_stime,
        peak_bytes=usage.ru_maxrss * 1024,
        watermark_bytes=watermark,
        other_cores=max(0.0, (_busy_seconds() - busy - own) / wall),
    )


def environment() -> dict[str, str]:
    """This process's environment, but Python may keep its bytecode, as it does after any ordinary installation."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def spread(values: Sequence[float], digits: int = 2) -> str:
    """``median [min..max]``."""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}..{max(values):.{digits}f}]"


def drop_from_cache(paths: Sequence[Path]) -> None:
    """Flush files and ask the kernel to forget their pages."""
    _each(paths, lambda descriptor: (os.fsync(descriptor), os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)))


def bring_into_cache(paths: Sequence[Path]) -> None:
    """Read files once."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(1 << 20)
            while file.readinto(buffer):
                pass


def _each(paths: Sequence[Path], action: Callable[[int], object]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            action(descriptor)
        finally:
            os.close(descriptor)


def _busy_seconds() -> float:
    """CPU seconds of all processes since boot, without idle and I/O wait."""
    fields = [int(f) for f in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, *_ = fields
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _watermark_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
