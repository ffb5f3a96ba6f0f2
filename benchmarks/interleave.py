"""Several programs that do one job, in one interleaved loop whose order turns by one each round; and the table."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from measure import Run, bring_into_cache, drop_from_cache, run, spread


def interleaved(
    rows: Sequence[str],
    command: Callable[[str, Path], list[str]],
    inputs: Sequence[Path],
    work: Path,
    cache: str,
    rounds: int,
) -> dict[str, list[Run]]:
    """Run each row once a round.

    Args:
        rows: names of the programs.
        command: row and output path → command line.
        inputs: files that are brought into the page cache (``warm``) or dropped from it (``cold``) before each run.
        work: where outputs and logs go.
        cache: ``warm`` or ``cold``.
        rounds: how often.
    """
    runs: dict[str, list[Run]] = {row: [] for row in rows}
    for number in range(rounds):
        turn = number % len(rows)
        for row in [*rows[turn:], *rows[:turn]]:
            out = work / "out"
            remove(out)
            os.sync()  # nothing of the last run is left to be written
            (drop_from_cache if cache == "cold" else bring_into_cache)(inputs)
            runs[row].append(run(command(row, out), work / "log.txt"))
            last = runs[row][-1]
            print(f"{cache} round {number + 1} {row}: {last.wall_seconds:.2f} s", file=sys.stderr)
    remove(work / "out")
    return runs


def merge_parser(doc: str, rows: Sequence[str], *, gigabytes: float, cache: str) -> argparse.ArgumentParser:
    """The options that all benchmarks of a merge have; ``gigabytes`` and ``cache`` are their defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=gigabytes, help="bytes of the fp32 weights, in 1e9")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", choices=("cold", "warm", "both"), default=cache)
    parser.add_argument("--only", nargs="+", choices=rows, default=list(rows))
    parser.add_argument("--directory", default="/tmp/ckptflow-benchmark", help="where inputs and outputs go")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint for the next time")
    return parser


def remove(path: Path) -> None:
    """A file or a directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def print_table(runs: Mapping[str, Sequence[Run]], inputs: Sequence[Path], cache: str, base: str) -> None:
    """One line a row; ratios are per round, against ``base`` where that was run."""
    gigabytes = sum(path.stat().st_size for path in inputs) / 1e9
    rounds = len(next(iter(runs.values())))
    print(f"\n{gigabytes:.2f} GB in {len(inputs)} input files, {cache} page cache, n = {rounds}\n")
    print(f"| row | wall s | x {base} | user s | sys s | peak RSS MB | VmHWM MB | other cores |")
    print("|---|---|---|---|---|---|---|---|")
    for row, results in runs.items():
        ratios = [a.wall_seconds / b.wall_seconds for a, b in zip(results, runs.get(base, []), strict=False)]
        cells = [
            spread([r.wall_seconds for r in results]),
            spread(ratios) if ratios else "-",
            spread([r.user_seconds for r in results]),
            spread([r.system_seconds for r in results]),
            f"{max(r.peak_bytes for r in results) / 1e6:.0f}",
            f"{max(r.watermark_bytes for r in results) / 1e6:.0f}",
            spread([r.other_cores for r in results]),
        ]
        print(f"| {row} | {' | '.join(cells)} |")


def print_ratios(runs: Mapping[str, Sequence[Run]], ours: str) -> None:
    """How many times longer and larger each other row is than ``ours``, per round."""
    for row, results in runs.items():
        if row == ours or ours not in runs:
            continue
        pairs = list(zip(results, runs[ours], strict=True))
        wall = spread([a.wall_seconds / b.wall_seconds for a, b in pairs])
        peak = spread([a.peak_bytes / b.peak_bytes for a, b in pairs])
        print(f"\n{row} / {ours}: wall {wall}, peak RSS {peak}")
