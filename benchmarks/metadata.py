"""How long ``ckptflow inspect`` takes: on a small checkpoint, one file of 100,000 tensors, and shards of many ranks.

Whole processes from the command line, in one interleaved loop; single files against
``torch.load(mmap=True, weights_only=True)`` of the same file. The rows of rank files hold equally many shards: few
tensors on many ranks, and many tensors on few.

    python benchmarks/metadata.py --tensors 100000 --shards 51200 --rounds 5
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
SHARD = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from rank_writer import mesh_of, save_ranks
from torch.distributed.tensor import DTensor, Shard
ranks, count = int(sys.argv[2]), int(sys.argv[3])
def state(rank):
    mesh = mesh_of((ranks,))
    local = [torch.full((1, 4), float(number)) for number in range(count)]
    return {f"w{i}": DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for i, part in enumerate(local)}
save_ranks(Path(sys.argv[4]), ranks, state)
"""
SUPPORT = Path(__file__).parent.parent / "tests/support"
RANKS = (16, 512)
LOAD = "import sys, torch; torch.load(sys.argv[1], mmap=True, weights_only=True)"


def main() -> None:
    """Make the files, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--shards", type=int, default=51_200, help="in the rank files")
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
        for ranks in RANKS:
            path, count = Path(directory) / f"ranks-{ranks}", args.shards // ranks
            subprocess.run([sys.executable, "-c", SHARD, *map(str, (SUPPORT, ranks, count, path))], check=True)
            bring_into_cache(list(path.iterdir()))
            rows[f"ckptflow inspect, {count} tensors on {ranks} ranks"] = (["ckptflow", "inspect", str(path)], [])
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
