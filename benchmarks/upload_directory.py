"""Speed of ``ckptflow upload`` to a directory, against copying by hand.

Whole processes from the command line, in one interleaved loop whose order turns by one each round:

- ``ckptflow``: copies, reads every byte of the copy back from the disk, puts the marker last;
- ``ckptflow size``: with ``--verify size``, which reads nothing back;
- ``cp``: ``cp -r`` and ``sync``;
- ``by hand``: the same, then ``sha256sum`` of both sides, the copy's read from the disk.

    python benchmarks/upload_directory.py --gigabytes 3.2 --rounds 5
    python benchmarks/upload_directory.py --gigabytes 3.2 --files 8 --only ckptflow cp
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from interleave import interleaved, print_ratios, print_table
from upload_speed import MODEL

ROWS = ("ckptflow", "ckptflow size", "cp", "by hand")
_CP = 'cp -r "$1" "$2" && sync -f "$2"'
_BY_HAND = f"""set -e
{_CP}
find "$2" -type f -exec dd of={{}} oflag=nocache conv=notrunc,fdatasync count=0 status=none ';'
cd "$1"; find . -type f -exec sha256sum {{}} + | (cd "$2"; sha256sum --quiet -c)
"""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3.2, help="bytes of the weights, in 1e9")
    parser.add_argument("--files", type=int, default=1, help="weight files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", choices=("cold", "warm"), default="warm", help="of the model")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--directory", default="/tmp/ckptflow-benchmark", help="where the model and its copies go")
    arguments = parser.parse_args()
    work = Path(arguments.directory)
    model = _write_model(work / "model", int(arguments.gigabytes * 1e9) // arguments.files, arguments.files)
    inputs = sorted(model.glob("*.safetensors"))
    command = partial(_command, model)
    runs = interleaved(arguments.only, command, inputs, work, arguments.cache, arguments.rounds)
    print_table(runs, inputs, arguments.cache, "cp")
    print_ratios(runs, "ckptflow")
    shutil.rmtree(model)


def _write_model(out: Path, nbytes: int, files: int) -> Path:
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-c", MODEL, str(out), str(nbytes), str(files)], check=True)
    return out


def _command(model: Path, row: str, out: Path) -> list[str]:
    script = str(Path(sys.executable).with_name("ckptflow"))
    if row.startswith("ckptflow"):
        verify = ["--verify", "size"] if row == "ckptflow size" else []
        return [script, "upload", str(model), out.as_uri(), *verify]
    return ["bash", "-c", _CP if row == "cp" else _BY_HAND, "copy", str(model), str(out)]


if __name__ == "__main__":
    main()
