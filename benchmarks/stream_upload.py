"""``--no-local-copy`` beside convert, verify and upload: wall time, CPU, peak memory and disk, to one real S3 server.

Whole processes in one interleaved loop whose order turns by one each round, each to a prefix of its own that is deleted
afterwards:

- ``streamed``: ``ckptflow.publish.streaming.stream``, proof included: the model is read back from the server;
- ``local``: ``convert``, ``verify --against`` and ``upload`` in one process;
- ``local, unproven``: ``convert`` and ``upload`` alone.

The server is SeaweedFS on the same machine, so that its CPU competes with the client's: compare rows of one table only.
Peak memory is that of the largest process; transformers' description of the model runs beside in both proven rows.

    python benchmarks/stream_upload.py --gigabytes 1.2 --rounds 3
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from interleave import print_ratios
from measure import Run, bring_into_cache, run, spread

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests/support"))

BUCKET = "benchmark"
LOOK_SECONDS = 0.05
_PLAN = """
import sys
from pathlib import Path
from ckptflow.conversion import plan_conversion
from ckptflow.request import ConvertRequest
path, out, uri = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
request = ConvertRequest(path=path, out=out)
"""
_CONVERT = (
    _PLAN
    + """
from ckptflow.convert import convert
from ckptflow.publish import upload
convert(request)
"""
)
_VERIFY = """
from ckptflow.validate.verify import verify
verify(out, against=path).raise_if_failed()
"""
_UPLOAD = """
upload(out, uri)
"""
PROGRAMS = {
    "streamed": _PLAN
    + """
from ckptflow.publish.streaming import Streaming, stream
stream(Streaming(conversion=plan_conversion(request), uri=uri))
""",
    "local": _CONVERT + _VERIFY + _UPLOAD,
    "local, unproven": _CONVERT + _UPLOAD,
}


def main() -> None:
    """Command line."""
    arguments = _parse()
    from servers.seaweed import running_seaweed
    from servers.tls import self_signed

    work = Path(arguments.directory)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    checkpoint = work / "run" / "global_step_10" / "actor"
    # In a process of its own: until a child's exec, the child's peak memory is its parent's.
    command = [sys.executable, str(HERE / "synthetic.py"), str(checkpoint), "--gigabytes", str(arguments.gigabytes)]
    subprocess.run(command, check=True)
    inputs = [path for path in checkpoint.rglob("*") if path.is_file()]
    runs: dict[str, list[Run]] = {row: [] for row in arguments.only}
    disk: dict[str, list[int]] = {row: [] for row in arguments.only}
    with running_seaweed(work / "server", tls=self_signed(work) if arguments.tls else None) as server:
        os.environ.update(server.environment())
        client = server.client()
        client.create_bucket(Bucket=BUCKET)
        for number in range(arguments.rounds):
            turn = number % len(arguments.only)
            for row in arguments.only[turn:] + arguments.only[:turn]:
                bring_into_cache(inputs)
                uri = f"s3://{BUCKET}/{row.replace(', ', '-')}-{number}"
                out = work / "local" / "model"
                with _watched(out.parent) as most:
                    runs[row].append(
                        run([sys.executable, "-c", PROGRAMS[row], *map(str, (checkpoint, out, uri))], work / "log")
                    )
                disk[row].append(most[0])
                shutil.rmtree(out.parent, ignore_errors=True)
                _delete(client, uri.removeprefix(f"s3://{BUCKET}/"))
                print(f"round {number + 1} {row}: {runs[row][-1].wall_seconds:.1f} s", file=sys.stderr)
    _print_table(runs, disk, inputs, arguments)
    shutil.rmtree(work)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.2, help="size of the fp32 checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--directory", default="/tmp/ckptflow-stream-upload", help="emptied first")
    return parser.parse_args()


@contextmanager
def _watched(directory: Path) -> Iterator[list[int]]:
    """The most bytes that lay in the directory inside the block, looked at many times a second."""
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(LOOK_SECONDS):
            most[0] = max(most[0], sum(_allocated_bytes(path) for path in directory.rglob("*")))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def _allocated_bytes(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _delete(client: object, prefix: str) -> None:
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", [])  # type: ignore[attr-defined]
    if not any(entry["Key"].endswith("ckptflow.json") for entry in listed):
        raise SystemExit(f"{prefix}: not published")
    for entry in listed:
        client.delete_object(Bucket=BUCKET, Key=entry["Key"])  # type: ignore[attr-defined]


def _print_table(
    runs: dict[str, list[Run]], disk: dict[str, list[int]], inputs: list[Path], arguments: argparse.Namespace
) -> None:
    gigabytes = sum(path.stat().st_size for path in inputs) / 1e9
    print(f"\n{gigabytes:.2f} GB checkpoint, {'TLS' if arguments.tls else 'no TLS'}, ", end="")
    print(f"{arguments.rounds} rounds, {os.cpu_count()} cores; median [min..max]\n")
    print("| row | wall s | CPU s | peak RSS MB | peak disk MB | other cores busy |")
    print("|---|---|---|---|---|---|")
    for row, results in runs.items():
        cells = [
            spread([r.wall_seconds for r in results]),
            spread([r.user_seconds + r.system_seconds for r in results]),
            f"{statistics.median(r.peak_bytes for r in results) / 1e6:.0f}",
            f"{max(disk[row]) / 1e6:.1f}",
            spread([r.other_cores for r in results], 1),
        ]
        print(f"| {row} | {' | '.join(cells)} |")
    print_ratios(runs, "streamed")


if __name__ == "__main__":
    main()
