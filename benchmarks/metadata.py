"""How long ``ckptflow inspect`` takes: on a small checkpoint, and on one file of 100,000 tensors.

Whole processes from the command line, against ``torch.load(mmap=True, weights_only=True)`` of the same file in one
interleaved loop.

    python benchmarks/metadata.py --tensors 100000 --rounds 5
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import Run, bring_into_cache, run, spread

MAKE = """
import sys, torch
count, path = int(sys.argv[1]), sys.argv[2]
torch.save({f"layers.{i}.weight": torch.zeros(4) for i in range(count)}, path)
"""
LOAD = "import sys, torch; torch.load(sys.argv[1], mmap=True, weights_only=True)"


def main() -> None:
    """Make the files, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows: dict[str, tuple[list[str], list[Run]]] = {}
        for count in (20, args.tensors):
            path = Path(directory) / f"{count}" / "pytorch_model.bin"
            path.parent.mkdir()
            subprocess.run([sys.executable, "-c", MAKE, str(count), str(path)], check=True)
            bring_into_cache([path])
            rows[f"ckptflow inspect, {count} tensors"] = (["ckptflow", "inspect", str(path.parent)], [])
            rows[f"torch.load, {count} tensors"] = ([sys.executable, "-c", LOAD, str(path)], [])
        for _ in range(args.rounds):
            for command, runs in rows.values():
                runs.append(run(command, Path(directory) / "log"))
        print(f"n = {args.rounds}\n\n| row | wall s | user s | peak RSS MB | other cores |\n|---|---|---|---|---|")
        for name, (_, runs) in rows.items():
            wall, user = spread([r.wall_seconds for r in runs]), spread([r.user_seconds for r in runs])
            peak = max(r.peak_bytes for r in runs) / 1e6
            print(f"| {name} | {wall} | {user} | {peak:.0f} | {spread([r.other_cores for r in runs])} |")


if __name__ == "__main__":
    main()
