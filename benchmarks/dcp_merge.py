"""Speed and memory of ``ckptflow convert`` on a DCP checkpoint with optimizer, against torch's ``dcp_to_torch_save``.

Whole processes from the command line, in one interleaved loop. ckptflow writes the weights as they are, checks for NaN
and Inf, hashes, and flushes to the disk. ``python -m torch.distributed.checkpoint.format_utils dcp_to_torch`` has no
way to leave the optimizer out, and writes one file with everything, unchecked.

    python benchmarks/dcp_merge.py --gigabytes 2
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import partial
from pathlib import Path

from interleave import interleaved, merge_parser, print_ratios, print_table, remove

HERE = Path(__file__).parent
ROWS = ("ckptflow", "dcp_to_torch_save")


def main() -> None:
    """Command line."""
    arguments = _parse()
    work = Path(arguments.directory)
    checkpoint = work / f"dcp-{arguments.gigabytes}GB" / "step-10"
    if not (checkpoint / ".metadata").is_file():
        make = [sys.executable, str(HERE / "dcp_synthetic.py"), str(checkpoint)]
        make += ["--gigabytes", str(arguments.gigabytes), "--ranks", str(arguments.ranks)]
        subprocess.run(make, check=True)
    inputs = sorted(checkpoint.glob("*.distcp"))
    rows = [row for row in ROWS if row in arguments.only]
    for cache in ("cold", "warm") if arguments.cache == "both" else (arguments.cache,):
        runs = interleaved(rows, partial(_command, checkpoint), inputs, work, cache, arguments.rounds)
        print_table(runs, inputs, cache, "ckptflow")
        print_ratios(runs, "ckptflow")
    if not arguments.keep:
        remove(checkpoint.parent)


def _parse() -> argparse.Namespace:
    parser = merge_parser(__doc__ or "", ROWS, gigabytes=2.0, cache="warm")
    return parser.parse_args()


def _command(checkpoint: Path, row: str, out: Path) -> list[str]:
    if row == "dcp_to_torch_save":
        module = "torch.distributed.checkpoint.format_utils"
        return [sys.executable, "-W", "ignore", "-m", module, "dcp_to_torch", str(checkpoint), str(out)]
    script = str(Path(sys.executable).with_name("ckptflow"))
    return [script, "convert", str(checkpoint), str(out), "--dtype", "source", "--max-shard-size", "100GB"]


if __name__ == "__main__":
    main()
