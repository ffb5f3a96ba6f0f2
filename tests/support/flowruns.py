"""Starts flows as a person or a worker would, and reads what the Prefect server knows of them over its API."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptflow.demo.prefect_server import RunningPrefectServer
from ckptflow.processes.askprocess import ADDRESS_VARIABLE
from serverapi import ask_server

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowLab:
    """A Prefect server, and the environment in which flows find it and S3."""

    server: RunningPrefectServer
    environment: Mapping[str, str]

    def command(self, path: Path, uri: str, *options: str) -> list[str]:
        """``ckptflow run``."""
        return [sys.executable, "-m", "ckptflow.cli", "run", str(path), "--to", uri, "--json", *options]

    def start(self, path: Path, uri: str, *options: str, **environment: str) -> subprocess.Popen[str]:
        """Start ``ckptflow run`` in a process group of its own."""
        return subprocess.Popen(
            self.command(path, uri, *options),
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, path: Path, uri: str, *options: str, **environment: str) -> Finished:
        """``ckptflow run`` to its end."""
        return finish(self.start(path, uri, *options, **environment))

    def run_flows(self, *cases: dict[str, Any], **environment: str) -> list[dict[str, Any]]:
        """The flow by its parameters, one case after the other in one process; gives the final states."""
        done = subprocess.run(
            [sys.executable, str(HERE / "flow_process.py")],
            input=json.dumps({"cases": cases}),
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        states: list[dict[str, Any]] = json.loads(done.stdout)
        return states

    def runs(self, name: str) -> list[dict[str, Any]]:
        """Flow runs of that name, oldest first."""
        query = {"sort": "START_TIME_ASC", "flow_runs": {"name": {"any_": [name]}}}
        return self.ask("flow_runs/filter", query)

    def task_runs(self, run: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Task runs of a flow run, in the order of their start."""
        found = self.ask("task_runs/filter", _of(run))
        return sorted(found, key=lambda task_run: task_run["start_time"] or "")

    def file_runs(self, run: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Those that merge a single weight file."""
        return [each for each in self.task_runs(run) if re.match(r"merge .* file \d+ of \d+$", each["name"])]

    def artifacts(self, run: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Artifacts of a flow run, in the order in which they were made; tables are parsed."""
        found = sorted(self.ask("artifacts/filter", _of(run)), key=lambda artifact: artifact["created"])
        for artifact in found:
            if artifact["type"] == "table":
                artifact["data"] = json.loads(artifact["data"])
        return found

    def logs(self, run: Mapping[str, Any]) -> list[str]:
        """Log lines of a flow run and its tasks."""
        query = {"logs": {"flow_run_id": {"any_": [run["id"]]}}, "sort": "TIMESTAMP_ASC"}
        return [line["message"] for line in self.ask("logs/filter", query)]

    def ask(self, path: str, body: object | None = None) -> Any:
        """POST where there is a body, else GET."""
        return ask_server(self.server.api_url, path, body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A process that has ended."""

    status: int
    outcomes: list[dict[str, Any]]
    stderr: str


def finish(process: subprocess.Popen[str]) -> Finished:
    """Wait for ``ckptflow run`` and parse what it printed."""
    stdout, stderr = process.communicate(timeout=200)
    return Finished(status=process.returncode, outcomes=json.loads(stdout or "[]"), stderr=stderr)


def flow_environment(server: RunningPrefectServer | None, home: Path, s3: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without settings of Prefect, AWS and ckptflow, with those that are given."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name == ADDRESS_VARIABLE or not name.startswith(("PREFECT_", "AWS_", "CKPTFLOW_"))
    }
    prefect = {"PREFECT_HOME": str(home), **({} if server is None else {"PREFECT_API_URL": server.api_url})}
    return {**inherited, **s3, **prefect, "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1"}


def _of(run: Mapping[str, Any]) -> dict[str, Any]:
    return {"flow_runs": {"id": {"any_": [run["id"]]}}}
