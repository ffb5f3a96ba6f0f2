"""Processes for flow runs, forked from one that has imported what the flows need.

A new interpreter spends seconds on imports before a run begins, and Prefect's process worker starts two for each run.
Python's fork server (``multiprocessing``) imports once; it runs no thread and opens no connection or device, which is
what makes a fork of it safe.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
import sysconfig
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.forkserver import ensure_running, set_forkserver_preload
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc
from prefect.runner._control_channel import ControlChannel
from prefect.runner._process_manager import ProcessHandle, create_isolated_termination_scope
from prefect.settings import get_current_settings

from ckptflow.processes.askprocess import Server

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun
    from prefect.workers.process import ProcessJobConfiguration

# What runs of our deployments import before they do anything, and what post-training needs a little later. The first:
# multiprocessing has each child import the program that the worker was started by.
PRELOADED = (
    "prefect.cli",
    "prefect.flow_engine",
    "prefect.task_engine",
    "ckptflow_flows.post_training",
    "ckptflow_flows.sweep",
    "ckptflow_flows.retain",
    "ckptflow_flows.disk_usage",
    "safetensors.numpy",
    "torch",
)
# Variables that are read when they are needed, not when a library is imported.
READ_LATE = ("PREFECT_", "CKPTFLOW_", "AWS_", "DO_NOT_TRACK", "HF_TOKEN", "CUDA_VISIBLE_DEVICES")
OUR_PACKAGES = ("ckptflow", "ckptflow_tasks", "ckptflow_flows")
# Without a question for that long, its memory is given back until the next run.
ANSWERS_IDLE_SECONDS = 1800.0


class WarmProcess:
    """The fork server, and whether it is still what a new interpreter would be.

    Beside it the one that answers questions to transformers, for all runs of the worker. That one has imported it
    offline and without a GPU, which a flow is not.
    """

    def __init__(self) -> None:
        self._installed = installed_state()
        self._answers: Server | None = None

    def start(self) -> None:
        """Begin to import; doesn't wait for it."""
        set_forkserver_preload(list(PRELOADED))
        ensure_running()

    def environment(self) -> dict[str, str]:
        """Variables by which a run finds what was imported for all runs."""
        if self._answers is None or not self._answers.is_there():
            self.stop()
            self._answers = Server(ANSWERS_IDLE_SECONDS)
        return self._answers.environment()

    def stop(self) -> None:
        """End what answers questions; the fork server ends with this process and its last run."""
        if self._answers is not None:
            self._answers.stop()

    def unfit_for(self, configuration: ProcessJobConfiguration) -> str | None:
        """Why a run with this configuration needs an interpreter of its own; None where it doesn't."""
        if configuration._command_configured:
            return "its work pool or deployment has a command"
        early = sorted(
            name
            for name, value in configuration.env.items()
            if os.environ.get(name) != value and not name.startswith(READ_LATE)
        )
        if early:
            return f"its environment sets {', '.join(early)}"
        if installed_state() != self._installed:
            return "what is installed has changed since the worker's start: restart the worker"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkedStarter:
    """Starts the process of one flow run, in the terms of Prefect's ``ProcessStarter``.

    Attributes:
        environment: all of it, as the worker's configuration has it.
        cwd: directory of the process.
        is_shown: whether what it prints goes where the worker's goes, or nowhere.
        control_channel: tells the process why it is ended.
    """

    environment: Mapping[str, str | None]
    cwd: Path
    is_shown: bool
    control_channel: ControlChannel

    async def start(
        self, flow_run: FlowRun, task_status: anyio.abc.TaskStatus[ProcessHandle] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Start it, tell of it, and wait until it has ended."""
        variables = get_current_settings().to_environment_variables(exclude_unset=True)
        variables |= {name: value for name, value in self.environment.items() if value is not None}
        variables["PREFECT__FLOW_RUN_ID"] = str(flow_run.id)
        # The worker runs hooks of runs that were cancelled or crashed.
        variables["PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS"] = "false"
        port, token = self.control_channel.register(flow_run.id)
        variables |= {"PREFECT__CONTROL_PORT": str(port), "PREFECT__CONTROL_TOKEN": token}
        process = multiprocessing.get_context("forkserver").Process(
            target=run_engine, args=(variables, self.cwd, self.is_shown), name=f"flow run {flow_run.id}"
        )
        try:
            # Waits for the fork server, which may still import.
            await anyio.to_thread.run_sync(process.start)
            assert process.pid is not None
            handle = ProcessHandle(
                process,  # type: ignore[arg-type]  # like a SpawnProcess in all that is used
                termination_scope=create_isolated_termination_scope(process.pid),
            )
        except BaseException:
            self.control_channel.unregister(flow_run.id)
            raise
        task_status.started(handle)
        await anyio.to_thread.run_sync(process.join)


def run_engine(environment: Mapping[str, str], cwd: Path, is_shown: bool) -> None:
    """In the forked process: be what ``python -m prefect.engine`` is with that environment, and end as it does."""
    from prefect.context import refresh_global_settings_context
    from prefect.logging.configuration import setup_logging

    os.setsid()  # a signal for the worker's group is not for its runs
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if not is_shown:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    refresh_global_settings_context()
    setup_logging(incremental=False)
    sys.argv = ["prefect.engine"]
    sys.modules.pop("prefect.engine", None)  # which Python warns of where it runs it as a program
    try:
        runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
    finally:
        # A fork server's child leaves by os._exit, which would lose the last logs and events.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def installed_state() -> dict[str, tuple[int, int]]:
    """What an interpreter that starts now would import: installed distributions, as ``pip`` left them, and our modules.

    Returns:
        (modification time in nanoseconds, size in bytes) by path.
    """
    paths: list[Path] = []
    for kind in ("purelib", "platlib"):
        paths += Path(sysconfig.get_path(kind)).glob("*.dist-info")
    for name in OUR_PACKAGES:
        for place in __import__(name).__path__:
            paths += Path(place).rglob("*.py")
    found: dict[str, tuple[int, int]] = {}
    for path in paths:
        status: Any = path.stat()
        found[str(path)] = (status.st_mtime_ns, status.st_size)
    return found
