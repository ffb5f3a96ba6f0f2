"""Merging by the worker processes of a local Dask cluster: speed by their number, cost per weight file, and a kill.

The whole post-training flow runs each time, against a real Prefect server, with clusters of 1, 2 and 3 processes that
are up beforehand, and with threads of the flow's own process, in turns. All published files must have the sha256 of
those that the threads made. In the last run a worker is killed with -9 while it writes. Times are those of the server:

- wall: from the start of the first weight file to the end of the last one;
- before: from the end of the step before to that start: connecting, handing out, each worker's plan;
- per file: what a process spends on a file beyond the engine's own work on it.

    python benchmarks/dask_merge.py --gigabytes 2.4 --files 10 --rounds 3
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from measure import bring_into_cache, spread

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.resolve().parent / "tests/support"))

from ckptflow.demo.prefect_server import start_prefect_server  # noqa: E402
from daskcluster import DaskCluster, kill_in_the_middle_of_a_file, running_dask, workers_below  # noqa: E402
from flowruns import FlowLab, finish, flow_environment  # noqa: E402

THREADS = "threads"


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """One run.

    Attributes:
        wall_seconds: of all weight files together.
        before_seconds: until the first one began.
        engine_seconds: sum of what the engine took for each.
        files: name → sha256 of what was published, without the record, which tells times.
        peak_bytes: largest memory of a worker so far.
    """

    wall_seconds: float
    before_seconds: float
    engine_seconds: float
    files: Mapping[str, str]
    peak_bytes: int


def main() -> None:
    """Command line."""
    arguments = _parse()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # Python may keep its bytecode, as after any ordinary installation
    work = Path(arguments.directory)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    checkpoint = work / "merged" / "global_step_10"
    make = [sys.executable, str(HERE / "synthetic.py"), str(checkpoint), "--gigabytes", str(arguments.gigabytes)]
    subprocess.run(make, check=True)
    server = start_prefect_server(work / "server", log_path=work / "server.log")
    try:
        with ExitStack() as stack:
            lab = FlowLab(server=server, environment=flow_environment(server, work / "home", {}))
            bench = Bench(lab, work, checkpoint, arguments.files, arguments.threads)
            clusters = {}
            for count in arguments.processes:
                directory = work / f"dask-{count}"
                directory.mkdir()
                clusters[count] = stack.enter_context(
                    running_dask(directory, count, flow_environment(None, work / f"home-{count}", {}))
                )
            equal = _measure(bench, clusters, arguments.rounds)
    finally:
        server.stop()
    if not arguments.keep:
        shutil.rmtree(work)
    raise SystemExit(0 if equal else 1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.4, help="fp32 bytes of the checkpoint, in 1e9")
    parser.add_argument("--files", type=int, default=10, help="weight files, about")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 3], help="workers of each cluster")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None, help="of the engine, per weight file")
    parser.add_argument("--directory", default="/tmp/ckptflow-dask-merge", help="emptied first")
    parser.add_argument("--keep", action="store_true", help="keep what was made")
    return parser.parse_args()


def _measure(bench: Bench, clusters: Mapping[int, DaskCluster], rounds: int) -> bool:
    rows: dict[str, list[Merge]] = {THREADS: [], **{str(count): [] for count in clusters}}
    for cluster in clusters.values():
        bench.warm_up(cluster)
    for _ in range(rounds):
        rows[THREADS].append(bench.run(None))
        for count, cluster in clusters.items():
            rows[str(count)].append(bench.run(cluster))
    expected = rows[THREADS][0].files
    unequal = [name for name, runs in rows.items() for run in runs if run.files != expected]
    bench.print_table(rows)
    killed = bench.run(clusters[max(clusters)], kill=True)
    weights = [name for name in expected if name.endswith(".safetensors")]
    print(
        f"\n{len(expected)} files, {len(weights)} of them weight files; different from those of threads: "
        f"{unequal or 'none'}; after kill -9 of a worker that wrote {bench.killed}: "
        f"{'none' if killed.files == expected else 'DIFFERENT'}, {killed.wall_seconds:.2f} s"
    )
    return not unequal and killed.files == expected


class Bench:
    """Runs the flow on one checkpoint."""

    def __init__(self, lab: FlowLab, work: Path, checkpoint: Path, files: int, threads: int | None) -> None:
        self._lab, self._work, self._checkpoint = lab, work, checkpoint
        self._inputs = sorted(checkpoint.glob("*.pt"))
        self._bytes = sum(path.stat().st_size for path in self._inputs)
        most = int(self._bytes / 2 / files * 1.03)
        self._options = ("--no-forward", "--max-shard-size", f"{most}B")
        self._options += () if threads is None else ("--threads", str(threads))
        self.killed = ""

    def warm_up(self, cluster: DaskCluster) -> None:
        """Let every worker import what it needs."""
        from checkpoints import write_fsdp_step

        path = write_fsdp_step(self._work / f"warm-{cluster.workers_pid}")
        done = self._lab.run(
            path, (self._work / "models").as_uri(), "--no-forward", "--max-shard-size", "3KB", **_on(cluster)
        )
        assert done.status == 0, done.stderr

    def run(self, cluster: DaskCluster | None, kill: bool = False) -> Merge:
        """One run, with the inputs in the page cache."""
        models, place = self._work / "models", self._work / "place"
        bring_into_cache(self._inputs)
        options = (*self._options, "--work-dir", str(place))
        process = self._lab.start(self._checkpoint, models.as_uri(), *options, **_on(cluster))
        if kill and cluster is not None:
            self.killed = kill_in_the_middle_of_a_file(cluster.workers_pid, place)
        done = finish(process)
        assert done.status == 0, done.stderr
        *_, run = self._lab.runs("post-training merged step-10")
        published = models / "merged" / "step-10"
        merge = Merge(
            **self._times(run),
            files={path.name: _sha256(path) for path in published.iterdir() if path.name != "ckptflow.json"},
            peak_bytes=0 if cluster is None else max(map(_peak_bytes, _pids(cluster))),
        )
        shutil.rmtree(published)
        print(f"{cluster.address if cluster else THREADS}: {merge.wall_seconds:.2f} s", file=sys.stderr)
        return merge

    def _times(self, run: Mapping[str, Any]) -> dict[str, float]:
        merges = self._lab.file_runs(run)
        (before,) = (task for task in self._lab.task_runs(run) if task["name"].startswith("check replicas"))
        (table,) = (each for each in self._lab.artifacts(run) if each["key"] == "merge")
        first = min(_time(task["start_time"]) for task in merges)
        return {
            "wall_seconds": max(_time(task["end_time"]) for task in merges) - first,
            "before_seconds": first - _time(before["end_time"]),
            "engine_seconds": sum(row["seconds"] for row in table["data"]),
        }

    def print_table(self, rows: Mapping[str, list[Merge]]) -> None:
        """One line a row; scaling is per round, against one process."""
        rounds = len(rows[THREADS])
        print(f"\n{self._bytes / 1e9:.2f} GB of fp32 in, warm, {os.cpu_count()} CPUs, n = {rounds}\n")
        print("| processes | wall s | GB/s in | x one process | before s | per file ms | peak RSS of a worker MB |")
        print("|---|---|---|---|---|---|---|")
        for name, runs in rows.items():
            at_once = 2 if name == THREADS else int(name)
            walls = [run.wall_seconds for run in runs]
            files = sum(each.endswith(".safetensors") for each in runs[0].files)
            ones = rows.get("1", [])
            cells = [
                spread(walls),
                f"{self._bytes / statistics.median(walls) / 1e9:.2f}",
                spread([one.wall_seconds / run.wall_seconds for one, run in zip(ones, runs, strict=False)] or [1.0]),
                spread([run.before_seconds for run in runs]),
                spread([1000 * (run.wall_seconds * at_once - run.engine_seconds) / files for run in runs], 0),
                f"{max(run.peak_bytes for run in runs) / 1e6:.0f}",
            ]
            print(f"| {name} | {' | '.join(cells)} |")


def _on(cluster: DaskCluster | None) -> dict[str, str]:
    return {} if cluster is None else {"CKPTFLOW_TASK_RUNNER": "dask", "CKPTFLOW_CLUSTER_ADDRESS": cluster.address}


def _pids(cluster: DaskCluster) -> list[int]:
    return [process.pid for process in workers_below(cluster.workers_pid)]


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
