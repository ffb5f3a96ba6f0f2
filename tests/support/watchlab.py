"""A Prefect server, workers and watchers as real processes, each of which can be killed and started again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ckptflow.demo.prefect_server import free_loopback_port
from ckptflow.formats.step_names import global_step_of
from serverapi import ask_for_events, ask_server
from servers.prefect_database import put_migrated_database

ROOT = Path(__file__).resolve().parents[2]
DEPLOYMENTS = ROOT / "deployments" / "prefect.yaml"
POST_TRAINING = "post-training"
# Nothing here takes long; a machine that is busy with other things does.
PATIENCE_SECONDS = 800.0


@dataclass(slots=True)
class Lab:
    """All processes of one site; ``stop_all`` ends those that are left.

    Attributes:
        home: of Prefect, with the server's database and leases.
        runs_dir: the watched root.
        models_dir: the destination.
    """

    home: Path
    runs_dir: Path
    models_dir: Path
    port: int = field(default_factory=free_loopback_port)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def environment(self) -> dict[str, str]:
        """Of all processes: the settings that docs/operations.md names, with short times."""
        inherited = {n: v for n, v in os.environ.items() if not n.startswith(("PREFECT_", "AWS_", "CKPTFLOW_"))}
        return inherited | {
            "PREFECT_HOME": str(self.home),
            "PREFECT_API_URL": self.api_url,
            "PREFECT_SERVER_API_HOST": "127.0.0.1",
            "PREFECT_SERVER_API_PORT": str(self.port),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "PREFECT_SERVER_SERVICES_LATE_RUNS_AFTER_SECONDS": "3600",
            "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "1",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "DO_NOT_TRACK": "1",
            "NO_PROXY": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
        }

    def start(self, name: str, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a process in a group of its own; what it says goes to ``NAME.log``."""
        with (self.home / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                env=self.environment | environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def run(self, *command: str, **environment: str) -> str:
        """A command to its end; gives what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", *command],
            env=self.environment | environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start_server(self) -> subprocess.Popen[bytes]:
        process = self.start("server", "prefect", "server", "start")
        wait_until(lambda: self.is_healthy(), "the server answers")
        return process

    def is_healthy(self) -> bool:
        try:
            return bool(self.ask("health"))
        except OSError:
            return False

    def start_worker(self, pool: str = "ckptflow-gpu", limit: int = 1) -> subprocess.Popen[bytes]:
        options = ("--pool", pool, "--limit", str(limit))
        return self.start(f"worker-{pool}", "prefect", "worker", "start", *options)

    def start_watch(self, *options: str) -> subprocess.Popen[bytes]:
        places = (str(self.runs_dir), "--to", self.destination)
        return self.start("watch", "ckptflow.cli", "watch", *places, "--settle", "1", "--no-forward", *options)

    @property
    def destination(self) -> str:
        return f"file://{self.models_dir}"

    def deploy(self, *options: str) -> str:
        places = (str(self.runs_dir), "--to", self.destination, "--file", str(DEPLOYMENTS))
        return self.run("ckptflow.cli", "deploy", *places, *options)

    def ask(self, path: str, body: object | None = None) -> Any:
        """POST where there is a body, else GET."""
        return ask_server(self.api_url, path, body)

    def runs(self, run_name: str, flow: str = POST_TRAINING) -> list[dict[str, Any]]:
        """Runs of post-training for the checkpoints of one training run, in the order in which they began."""
        found = self.ask("flow_runs/filter", {"flows": {"name": {"any_": [flow]}}, "limit": 200})
        found += self.ask("flow_runs/filter", {"flows": {"name": {"any_": [flow]}}, "limit": 200, "offset": 200})
        mine = [run for run in found if f"/{run_name}/" in json.dumps(run["parameters"])]
        return sorted(mine, key=lambda run: run["start_time"] or "9")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events of that name."""
        return ask_for_events(self.api_url, name)

    def ready_events(self, run_name: str) -> list[str]:
        """Paths that ``ckptflow.checkpoint.ready`` named, for one training run."""
        events = self.events("ckptflow.checkpoint.ready")
        return sorted(e["payload"]["path"] for e in events if f"/{run_name}/" in e["payload"]["path"])

    def gpu_slots_in_use(self) -> int:
        slots: int = self.ask("v2/concurrency_limits/tag:gpu")["active_slots"]
        return slots

    def is_published(self, run_name: str, *steps: int) -> bool:
        """Whether the models of these steps are there, whole."""
        return all((self.models_dir / run_name / f"step-{n}" / "ckptflow.json").is_file() for n in steps)

    def stop_workers(self) -> None:
        """kill -9 of all workers, and of the flows that they run."""
        for process in self.started:
            if isinstance(process.args, list) and "worker" in process.args:
                kill(process)
        kill_flows(self)

    def stop_all(self) -> None:
        for process in self.started:
            kill(process)
        kill_flows(self)


def kill(process: subprocess.Popen[bytes]) -> None:
    """kill -9 of the process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def kill_alone(process: subprocess.Popen[bytes]) -> None:
    """kill -9 of the process only; its children live on."""
    process.kill()
    process.wait()


def kill_flows(lab: Lab) -> None:
    """kill -9 of all flow processes: they are in sessions of their own, so that a worker's death leaves them alive."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environ = path.read_bytes()
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        is_flow = b"prefect.engine" in command or b"multiprocessing.forkserver" in command
        if is_flow and f"PREFECT_HOME={lab.home}\0".encode() in environ:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.parent.name), signal.SIGKILL)


def wait_until(is_so: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Ask again and again."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            if is_so():
                return
        time.sleep(0.25)
    raise AssertionError(f"not so after {seconds:.0f} s: {what}")


def moment(text: str) -> float:
    """Seconds since the epoch of a time in the API."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def step_of(run: Mapping[str, Any]) -> int:
    """Global step of the checkpoint that a run is for."""
    step = global_step_of(Path(run["parameters"]["checkpoint"]["path"]))
    assert step is not None
    return step


@contextlib.contextmanager
def running_lab(base: Path) -> Iterator[Lab]:
    """A site with a server; all that it started is killed at the end."""
    lab = Lab(home=base / "prefect", runs_dir=base / "runs", models_dir=base / "models")
    for directory in (lab.home, lab.runs_dir, lab.models_dir):
        directory.mkdir(parents=True)
    try:
        put_migrated_database(lab.home)
        lab.start_server()
        yield lab
    finally:
        lab.stop_all()
