"""What the commands share: sizes as people write them, progress bars, tables, JSON."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
# The most that the kernel's offsets hold.
MAX_BYTES = 2**63


def parse_bytes(text: str) -> int:
    """``5GB``, ``512MB``, ``1.5GiB`` or a plain number, in bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"not a size: {text!r}; write it like 5GB or 512MB")
    size = float(match.group(1)) * UNITS[match.group(2)]
    if not 1 <= size < MAX_BYTES:
        raise argparse.ArgumentTypeError("a size must be larger than 0, and a number that a file can have")
    return int(size)


def format_bytes(count: float) -> str:
    """Bytes for people, in powers of ten: ``1.24 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def print_json(value: object) -> None:
    """One JSON document on stdout; in ASCII, since locales differ and names of files may be any bytes."""
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    # A pipe has no width: don't fold paths there.
    Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False).print(table)


@contextmanager
def progress_bar(description: str, total_bytes: int, quiet: bool = False) -> Iterator[Callable[[int], None] | None]:
    """Bytes done, GB/s and time left on stderr where that is a terminal; gives the callback, or None where it isn't."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total_bytes)

        def advance(count: int) -> None:
            bar.advance(task, count)

        yield advance
