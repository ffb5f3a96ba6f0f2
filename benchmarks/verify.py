"""Speed of ``ckptflow verify --against`` on a synthetic FSDP checkpoint, against the conversion and doing it by hand.

Whole processes from the command line, in one interleaved loop whose order turns by one each round:

- ``convert``: the conversion that is proven;
- ``verify``: hashes and scans the model, asks transformers for its names and shapes, compares the source's checksums,
  reads the source a second time by another path and compares every element;
- ``naive``: loads all ranks and the model, ``torch.cat``, ``.to(bfloat16)``, ``torch.equal``.

    python benchmarks/verify.py --gigabytes 3.3 --rounds 5
    python benchmarks/verify.py --gigabytes 1.2 --ranks 256 --only convert verify
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from interleave import interleaved, merge_parser, print_ratios, print_table

HERE = Path(__file__).parent
ROWS = ("convert", "verify", "naive")


def main() -> None:
    """Command line."""
    arguments = merge_parser(__doc__ or "", ROWS, gigabytes=1.2, cache="warm").parse_args()
    work = Path(arguments.directory)
    checkpoint = work / f"global_step_10-{arguments.gigabytes}GB-{arguments.ranks}"
    if not checkpoint.is_dir():
        make = [sys.executable, str(HERE / "synthetic.py"), str(checkpoint), "--gigabytes", str(arguments.gigabytes)]
        subprocess.run([*make, "--ranks", str(arguments.ranks)], check=True)
    model = work / "model"
    shutil.rmtree(model, ignore_errors=True)
    subprocess.run(_command(checkpoint, model, "convert", model), check=True)
    rows = [row for row in ROWS if row in arguments.only]
    for cache in ("cold", "warm") if arguments.cache == "both" else (arguments.cache,):
        inputs = sorted(checkpoint.glob("model_world_size_*.pt"))
        runs = interleaved(rows, partial(_command, checkpoint, model), inputs, work, cache, arguments.rounds)
        print_table(runs, inputs, cache, "convert")
        print_ratios(runs, "verify")
    if not arguments.keep:
        shutil.rmtree(checkpoint)
    shutil.rmtree(model)


def _command(checkpoint: Path, model: Path, row: str, out: Path) -> list[str]:
    script = str(Path(sys.executable).with_name("ckptflow"))
    if row == "convert":
        return [script, "convert", str(checkpoint), str(out), "--dtype", "bfloat16", "--max-shard-size", "100GB"]
    if row == "verify":
        return [script, "verify", str(model), "--against", str(checkpoint)]
    return [sys.executable, str(HERE / "naive_verify.py"), str(checkpoint), str(model)]


if __name__ == "__main__":
    main()
