"""From a complete checkpoint to the start of its run: real server, worker and watcher, one step after the other.

Each step is made aside and renamed into the watched root, so that it is complete at one moment. The time until the
run is ``Running`` is split by the server's record of the run's states:

- ours: until the run exists. watch saw the directory, found it complete and unpublished, and asked for the run;
- server and poll: until a worker had taken it, which asks once a second here;
- worker's start: until the flow said that it runs, in a process that was forked for it.

With ``--written`` the files' times are new, as after a save that just ended, and ours includes the settle time.

    python benchmarks/trigger_latency.py --steps 20
    python benchmarks/trigger_latency.py --steps 20 --written
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measure import spread

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))

from watchlab import Lab, moment, running_lab, wait_until

PARTS = ("ours", "server and poll", "worker's start", "all")


def main() -> None:
    """Command line."""
    arguments = _parse()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory, running_lab(Path(directory)) as lab:
        lab.deploy()
        lab.start("worker", "prefect", "worker", "start", "--pool", "ckptflow-gpu")
        places = (str(lab.runs_dir), "--to", lab.destination)
        lab.start("watch", "ckptflow.cli", "watch", *places, "--settle", str(arguments.settle), "--no-forward")
        _one(lab, 0, arguments.written)  # the first start of all compiles and caches
        rows = []
        for step in range(1, arguments.steps + 1):
            rows.append(_one(lab, step, arguments.written))
            print(step, *(f"{part} {rows[-1][part]:.2f} s" for part in PARTS), sep="  ", flush=True)
    kind = "written just now" if arguments.written else "renamed into place"
    print(
        f"\n{arguments.steps} steps {kind}, settle {arguments.settle:g} s, {os.cpu_count()} CPUs; median [min..max] s"
    )
    for part in PARTS:
        print(f"{part:<16} {spread([row[part] for row in rows])}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--written", action="store_true", help="files are new, so that the settle time counts")
    parser.add_argument("--settle", type=float, default=2.0, help="as ckptflow watch's, in seconds")
    parser.add_argument("--directory", default=tempfile.gettempdir())
    return parser.parse_args()


def _one(lab: Lab, step: int, is_written: bool) -> Mapping[str, float]:
    name = f"checkpoint-{step}"
    aside = lab.home.parent / "aside" / name
    _write_step(aside, time.time() - (0 if is_written else 3600))
    target = lab.runs_dir / "latency" / name
    target.parent.mkdir(exist_ok=True)
    complete = time.time()
    aside.rename(target)
    wait_until(lambda: any(run["state_type"] == "COMPLETED" for run in _runs(lab, target)), f"step {step} is done")
    (run,) = _runs(lab, target)
    with_times = lab.ask(f"flow_run_states/?flow_run_id={run['id']}")
    at = {state["type"]: moment(state["timestamp"]) for state in reversed(with_times)}
    created, running = moment(run["created"]), at["RUNNING"]
    return {
        "ours": created - complete,
        "server and poll": at["PENDING"] - created,
        "worker's start": running - at["PENDING"],
        "all": running - complete,
    }


def _runs(lab: Lab, path: Path) -> list[dict[str, Any]]:
    return [run for run in lab.runs(path.parent.name) if run["parameters"]["checkpoint"]["path"] == str(path)]


def _write_step(directory: Path, mtime: float) -> None:
    """A complete Hugging Face step of a few bytes, without a config: what the run does is not measured here."""
    import numpy as np
    from safetensors.numpy import save_file

    directory.mkdir(parents=True)
    save_file({"weight": np.ones((8, 8), np.float32)}, directory / "model.safetensors")
    (directory / "trainer_state.json").write_text(json.dumps({}))
    for path in (*directory.iterdir(), directory):
        os.utime(path, (mtime, mtime))


if __name__ == "__main__":
    main()
