"""Speed and memory of ``ckptflow convert`` on DeepSpeed checkpoints, against DeepSpeed's own ``zero_to_fp32.py``.

Whole processes from the command line, in one interleaved loop. Both write the fp32 masters as safetensors. ckptflow
checks for NaN and Inf, proves the masters by the 16-bit copies (stage 2), hashes, and flushes to the disk;
``zero_to_fp32.py`` does none of this. DeepSpeed is taken from another environment:

    python benchmarks/deepspeed_merge.py --stage 2 --gigabytes 2 --deepspeed-python /path/to/venv/bin/python
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from interleave import interleaved, merge_parser, print_ratios, print_table, remove

HERE = Path(__file__).parent
ROWS = ("ckptflow", "zero_to_fp32")
FIND = "import importlib.util as u; print(u.find_spec('deepspeed').submodule_search_locations[0])"


def main() -> None:
    """Command line."""
    arguments = _parse()
    work = Path(arguments.directory)
    script = None if "zero_to_fp32" not in arguments.only else _script(arguments.deepspeed_python, work)
    for stage in arguments.stage:
        checkpoint = work / f"zero{stage}-{arguments.gigabytes}GB"
        if not (checkpoint / "latest").is_file():
            make = [sys.executable, str(HERE / "deepspeed_synthetic.py"), str(checkpoint), "--stage", str(stage)]
            make += ["--gigabytes", str(arguments.gigabytes), "--ranks", str(arguments.ranks)]
            subprocess.run(make, check=True)
        inputs = sorted(checkpoint.rglob("*.pt"))
        command = partial(_command, checkpoint, [arguments.deepspeed_python, str(script)])
        rows = [row for row in ROWS if row in arguments.only]
        for cache in ("cold", "warm") if arguments.cache == "both" else (arguments.cache,):
            runs = interleaved(rows, command, inputs, work, cache, arguments.rounds)
            print(f"\nZeRO stage {stage}, {arguments.ranks} ranks")
            print_table(runs, inputs, cache, "ckptflow")
            print_ratios(runs, "ckptflow")
        if not arguments.keep:
            remove(checkpoint)


def _parse() -> argparse.Namespace:
    parser = merge_parser(__doc__ or "", ROWS, gigabytes=2.0, cache="warm")
    parser.add_argument("--stage", type=int, nargs="+", choices=(2, 3), default=[2, 3])
    parser.add_argument("--deepspeed-python", default=sys.executable, help="python of an environment with deepspeed")
    return parser.parse_args()


def _script(python: str, work: Path) -> Path:
    """A copy of DeepSpeed's script in a folder of its own, as DeepSpeed leaves one in every checkpoint."""
    found = subprocess.run([python, "-c", FIND], check=True, capture_output=True, text=True).stdout.strip()
    work.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(Path(found) / "utils" / "zero_to_fp32.py", work))


def _command(checkpoint: Path, deepspeed: list[str], row: str, out: Path) -> list[str]:
    if row == "zero_to_fp32":
        return [*deepspeed, str(checkpoint), str(out), "--safe_serialization", "--max_shard_size", "100GB"]
    script = str(Path(sys.executable).with_name("ckptflow"))
    return [script, "convert", str(checkpoint), str(out), "--dtype", "source", "--max-shard-size", "100GB"]


if __name__ == "__main__":
    main()
