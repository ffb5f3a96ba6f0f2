"""Speed and memory of ``ckptflow convert`` on a synthetic FSDP checkpoint, against ``cp`` and against doing it by hand.

Whole processes from the command line, in one interleaved loop whose order turns by one each round:

- ``cp + fsync``: copies the rank files and flushes the copies;
- ``ckptflow``: merges, casts to bfloat16, checks for NaN and Inf, hashes, flushes;
- ``naive``: loads all ranks, ``torch.cat``, ``.to(bfloat16)``, ``save_file``, check, sha256, flush.

Cold means fsync and POSIX_FADV_DONTNEED on the inputs before each run; a hypervisor may still hold the pages.

    python benchmarks/fsdp_merge.py --gigabytes 1.2 --cache warm --rounds 5
    python benchmarks/fsdp_merge.py --gigabytes 3.3 --cache cold
    python benchmarks/fsdp_merge.py --gigabytes 8 --cache cold --only ckptflow --rounds 2
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from interleave import interleaved, merge_parser, print_ratios, print_table

HERE = Path(__file__).parent
ROWS = ("cp + fsync", "ckptflow", "naive")


def main() -> None:
    """Command line."""
    arguments = _parse()
    work = Path(arguments.directory)
    checkpoint = work / f"global_step_10-{arguments.gigabytes}GB"
    if not checkpoint.is_dir():
        make = [sys.executable, str(HERE / "synthetic.py"), str(checkpoint), "--gigabytes", str(arguments.gigabytes)]
        subprocess.run([*make, "--ranks", str(arguments.ranks)], check=True)
    rows = [row for row in ROWS if row in arguments.only]
    for cache in ("cold", "warm") if arguments.cache == "both" else (arguments.cache,):
        inputs = _inputs(checkpoint)
        runs = interleaved(rows, partial(_command, checkpoint), inputs, work, cache, arguments.rounds)
        print_table(runs, inputs, cache, "cp + fsync")
        print_ratios(runs, "ckptflow")
    if not arguments.keep:
        shutil.rmtree(checkpoint)


def _parse() -> argparse.Namespace:
    parser = merge_parser(__doc__ or "", ROWS, gigabytes=1.2, cache="both")
    return parser.parse_args()


def _command(checkpoint: Path, row: str, out: Path) -> list[str]:
    if row == "naive":
        return [sys.executable, str(HERE / "naive_merge.py"), str(checkpoint), str(out)]
    if row == "ckptflow":
        script = str(Path(sys.executable).with_name("ckptflow"))
        return [script, "convert", str(checkpoint), str(out), "--dtype", "bfloat16", "--max-shard-size", "100GB"]
    copies = 'mkdir "$0" && cp "$@" "$0" && sync "$0"/*'
    return ["sh", "-c", copies, str(out), *map(str, _inputs(checkpoint))]


def _inputs(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("model_world_size_*.pt"))


if __name__ == "__main__":
    main()
