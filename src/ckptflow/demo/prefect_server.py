"""A Prefect server of the demo's own: a process on a free loopback port, with its data in one directory.

The library never imports Prefect, so the server is only ever started and asked over HTTP.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from ckptflow.errors import CkptflowError

START_TIMEOUT_SECONDS = 180.0
"""A new database is migrated first: 20 to 30 s on two free cores, several times that on busy ones."""

STOP_TIMEOUT_SECONDS = 10.0

# Straight to the loopback interface, whatever proxy the environment names.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPrefectServer:
    """A server that answers; :meth:`client_env` is what a flow's process needs to report to it."""

    api_url: str
    ui_url: str
    home: Path
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """The server's process id, also its process group."""
        return self.process.pid

    def client_env(self) -> dict[str, str]:
        """Environment variables for a process that runs flows against this server."""
        return {"PREFECT_API_URL": self.api_url, "PREFECT_HOME": str(self.home), "DO_NOT_TRACK": "1"}

    def flow_runs(self) -> list[FlowRunLink]:
        """All flow runs so far, oldest first, without subflows."""
        query = {"sort": "START_TIME_ASC", "flow_runs": {"parent_task_run_id": {"is_null_": True}}}
        return [
            FlowRunLink(
                name=run["name"],
                state=run["state_name"] or "",
                seconds=float(run["total_run_time"]),
                url=f"{self.ui_url}/v2/runs/flow-run/{run['id']}",
            )
            for run in json.loads(_request(f"{self.api_url}/flow_runs/filter", json.dumps(query).encode()))
        ]

    def stop(self) -> None:
        """Ends the server and all that it started. Does nothing when it has ended already."""
        stop_process_group(self.process)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRunLink:
    """One flow run and where to look at it."""

    name: str
    state: str
    seconds: float
    url: str


def start_prefect_server(home: Path, *, log_path: Path, tries: int = 3) -> RunningPrefectServer:
    """Starts a server with its database in ``home`` and waits until it answers.

    It listens on 127.0.0.1 only and sends no analytics. It ends with :meth:`RunningPrefectServer.stop`, not with
    this process.

    Raises:
        CkptflowError: it ended or did not answer in time; its log is kept at ``log_path``.
    """
    home.mkdir(parents=True, exist_ok=True)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(tries):
        port = free_loopback_port()
        api_url = f"http://127.0.0.1:{port}/api"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "prefect", "server", "start"],
                env=_server_env(home, port),
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            if _wait_until_healthy(process, api_url):
                ui_url = f"http://127.0.0.1:{port}"
                return RunningPrefectServer(api_url=api_url, ui_url=ui_url, home=home, process=process)
        except BaseException:  # Ctrl-C while waiting must not leave a server behind
            stop_process_group(process)
            raise
        stop_process_group(process)
    raise CkptflowError("the Prefect server did not start", file=log_path, fix="read the end of this log")


def _server_env(home: Path, port: int) -> dict[str, str]:
    # Settings of the person's own Prefect, a Cloud workspace for one, must not reach the demo.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return inherited | {
        "PREFECT_HOME": str(home),
        # Not --host and --port: the UI reads its API address from the settings, which the flags don't reach.
        "PREFECT_SERVER_API_HOST": "127.0.0.1",
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "DO_NOT_TRACK": "1",
    }


def _wait_until_healthy(process: subprocess.Popen[bytes], api_url: str) -> bool:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            _request(f"{api_url}/health")
        except OSError:  # not listening yet, or listening and not ready (URLError and HTTPError are OSErrors)
            time.sleep(0.25)
        else:
            # The port may have been taken by another process in between: then ours has ended.
            return process.poll() is None
    return False


def _request(url: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    with _opener.open(request, timeout=30) as response:
        content: bytes = response.read()
    return content


def free_loopback_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def stop_process_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that was started in a session of its own, and its children: asks first, then kills.

    Does nothing when the process is known to have ended: its id may be another's by now.
    """
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=STOP_TIMEOUT_SECONDS)
    # The leader may be gone: children that ignored the request go with the second signal.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
