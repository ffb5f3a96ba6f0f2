"""The worker of our pools: Prefect's process worker, whose runs are forked from a process that has imported all."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc
from prefect.flows import load_flow_from_flow_run
from prefect.runner._flow_run_executor import FlowRunExecutorContext
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker, ProcessWorkerResult

from ckptflow_flows.forking import ForkedStarter, WarmProcess

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

POOL_TYPE = "ckptflow"


class CkptflowWorker(ProcessWorker):
    """Starts each run in a process of its own, without the seconds that new interpreters take.

    ``prefect worker start --pool ckptflow-gpu`` finds it by the pool's type. It differs from Prefect's process worker
    in how a run's process begins, and only where the run can't tell the difference: elsewhere, as after an update of
    what is installed, the run begins as the process worker has it.
    """

    type = POOL_TYPE
    _description = "Runs flows in processes that are forked from one that has imported what ckptflow's flows need."
    _display_name = "ckptflow"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._warm = WarmProcess()

    async def setup(self) -> None:
        """Connect, and begin to import what runs will need."""
        await super().setup()
        await anyio.to_thread.run_sync(self._warm.start)

    async def teardown(self, *exc_info: Any) -> None:
        """Disconnect, and end what was started for all runs."""
        await super().teardown(*exc_info)
        self._warm.stop()

    async def run(
        self,
        flow_run: FlowRun,
        configuration: ProcessJobConfiguration,
        task_status: anyio.abc.TaskStatus[int] | None = None,
    ) -> ProcessWorkerResult:
        """One run, until its process has ended."""
        reason = self._warm.unfit_for(configuration)
        if reason is not None:
            self.get_flow_run_logger(flow_run).info("Begun by new interpreters, which takes seconds: %s", reason)
            return await super().run(flow_run, configuration, task_status)
        directory: contextlib.AbstractContextManager[str | Path] = tempfile.TemporaryDirectory(suffix="prefect")
        if configuration.working_dir is not None:
            directory = contextlib.nullcontext(configuration.working_dir)
        with directory as cwd:
            async with FlowRunExecutorContext() as context:
                starter = ForkedStarter(
                    environment={**configuration.env, **self._warm.environment()},
                    cwd=Path(cwd).resolve(),
                    is_shown=configuration.stream_output,
                    control_channel=context.control_channel,
                )
                executor = context.create_executor(
                    flow_run, starter, resolve_flow=load_flow_from_flow_run, propose_submitting=False
                )
                result = None

                async def execute(*, task_status: anyio.abc.TaskStatus[Any] = anyio.TASK_STATUS_IGNORED) -> None:
                    nonlocal result
                    result = await executor.submit(task_status=task_status)

                async with anyio.create_task_group() as group:
                    handle = await group.start(execute)
                    if task_status is not None:
                        task_status.started(handle.pid)
        if result is None or result.status_code is None:
            raise RuntimeError(f"the process of flow run {flow_run.id} gave no status")
        return ProcessWorkerResult(status_code=result.status_code, identifier=str(result.handle.pid))
