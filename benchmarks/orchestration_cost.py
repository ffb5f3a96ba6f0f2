"""What Prefect costs: wall time of the flow beyond the library's own work, and of each further weight file.

The same checkpoint is converted, verified and published to a directory by the library's functions in a plain process,
and by the flow in a process that reports to a running server. Both are timed without imports, in turns, and both ask a
process that has imported transformers, as runs of a worker do. More weight files mean more tasks; the slope of the
difference over their number is the cost of one. It is taken of the least times: a server on SQLite answers many
requests for a slot with 503, and Prefect's client waits two seconds then, or four, whatever the number of files.

    python benchmarks/orchestration_cost.py --gigabytes 1 --files 1 11 21 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from ckptflow.processes.askprocess import Server
from measure import environment, spread

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.resolve().parent / "tests/support"))

#: Seconds of the library and of the flow, one after the other.
Sample = tuple[float, float]

LIBRARY = """
import json, sys, time
from pathlib import Path
from ckptflow.convert import convert
from ckptflow.publish.upload import upload
from ckptflow.request import ConvertRequest
from ckptflow.validate.verify import verify
import torch, safetensors
source, work, to, most = sys.argv[1:]
begin = time.monotonic()
out = Path(work) / "model"
convert(ConvertRequest(path=Path(source), out=out, max_shard_bytes=int(most)))
verify(out, against=Path(source), forward=False).raise_if_failed()
upload(out, to)
print(json.dumps({"seconds": time.monotonic() - begin, "files": len(list(out.glob("*.safetensors")))}))
"""

FLOW = """
import json, os, sys, time
from ckptflow_flows.command import PREFECT_DEFAULTS
for name, value in PREFECT_DEFAULTS.items():
    os.environ.setdefault(name, value)
from ckptflow_flows.post_training import post_training
from ckptflow_flows.settings import Destination, Machine, PostTraining, Recipe, Validation
import torch, safetensors
source, work, to, most = sys.argv[1:]
parameters = PostTraining(
    path=source, destinations=(Destination(uri=to),), recipe=Recipe(max_shard_bytes=int(most)),
    machine=Machine(work_dir=work, keep_local=True), validation=Validation(forward=False),
)
begin = time.monotonic()
state = post_training(parameters, return_state=True)
seconds = time.monotonic() - begin
assert state.is_completed(), state
print(json.dumps({"seconds": seconds, "files": state.data["files"] if isinstance(state.data, dict) else 0}))
"""


def main() -> None:
    """Command line."""
    arguments = _parse()
    from watchlab import running_lab

    with (
        tempfile.TemporaryDirectory(dir=arguments.directory) as directory,
        running_lab(Path(directory)) as lab,
        Server(idle_seconds=86_400) as asked,
    ):
        variables = lab.environment | asked.environment()
        checkpoint = Path(directory) / "cost" / "global_step_10"
        make = [sys.executable, str(HERE / "synthetic.py"), str(checkpoint), "--gigabytes", str(arguments.gigabytes)]
        subprocess.run(make, check=True)
        _time(LIBRARY, checkpoint, int(arguments.gigabytes * 1e9), variables)  # with which that process has its imports
        print(f"{arguments.gigabytes:g} GB, {arguments.rounds} rounds, {os.cpu_count()} CPUs; median [min..max] s\n")
        print("| weight files | library | flow | flow beyond it | least beyond it |\n|---|---|---|---|---|")
        samples: dict[int, list[Sample]] = {}
        for _ in range(arguments.rounds):
            for count in arguments.files:
                most = _most_bytes(arguments.gigabytes, count)
                library, flow = (_time(program, checkpoint, most, variables) for program in (LIBRARY, FLOW))
                samples.setdefault(int(library["files"]), []).append((library["seconds"], flow["seconds"]))
    points = [_row(files, taken) for files, taken in samples.items()]
    if len(points) > 1:
        (first, one), (last, many) = points[0], points[-1]
        print(f"\nper further weight file: {1000 * (many - one) / (last - first):.0f} ms")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="fp32 bytes of the checkpoint, in 1e9")
    parser.add_argument("--files", type=int, nargs="+", default=[1, 11, 21], help="weight files, about")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    return parser.parse_args()


def _most_bytes(gigabytes: float, count: int) -> int:
    """Bytes per weight file (bfloat16) that give about so many."""
    return int(gigabytes * 1e9) if count == 1 else int(gigabytes * 1e9 / 2 / count * 1.03)


def _row(files: int, samples: list[Sample]) -> tuple[int, float]:
    """Print the row of one number of weight files: that number, and the least seconds beyond the library's work."""
    library, flow = zip(*samples, strict=True)
    beyond, least = statistics.median(flow) - statistics.median(library), min(flow) - min(library)
    print(f"| {files} | {spread(library)} | {spread(flow)} | {beyond:.2f} | {least:.2f} |")
    return files, least


def _time(program: str, checkpoint: Path, most_bytes: int, variables: dict[str, str]) -> dict[str, float]:
    work = checkpoint.parent.parent / "work"
    models = checkpoint.parent.parent / "out"
    for directory in (work, models):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program, str(checkpoint), str(work), f"file://{models}", str(most_bytes)],
        env=environment() | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)
    timed: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return timed


if __name__ == "__main__":
    main()
