"""Where weight files are written: in threads of the flow's process, or by the workers of a Dask or Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from ckptflow.errors import UsageError
from ckptflow_tasks.limits import LIMITS


class Workers(BaseSettings):
    """Who does the tasks that are mapped; ``CKPTFLOW_TASK_RUNNER`` sets ``task_runner``, and so on.

    Attributes:
        task_runner: ``threads`` of this process, or processes on any machine that has the same file system: ``dask`` or
            ``ray``.
        cluster_address: of a running cluster, ``tcp://HOST:8786`` or ``ray://HOST:10001``; None: a cluster of
            ``files_at_once`` processes on this machine, for as long as the run takes.
        files_at_once: see ``Limits``. A running cluster does as many as it has workers.
    """

    model_config = SettingsConfigDict(env_prefix="CKPTFLOW_", frozen=True)

    task_runner: Literal["threads", "dask", "ray"] = "threads"
    cluster_address: str | None = None
    files_at_once: int = Field(LIMITS.files_at_once, gt=0)

    def prefect_runner(self) -> TaskRunner[Any]:
        """A task runner for a flow: of the site's settings in its decorator, of others by ``with_options``.

        Raises:
            UsageError: its package is not installed, or the workers of a running cluster would find no server.
        """
        if self.task_runner == "threads":
            return ThreadPoolTaskRunner(max_workers=self.files_at_once)
        if self.cluster_address is not None and PREFECT_API_URL.value() is None:
            raise UsageError(
                "the workers of a cluster need a Prefect server that they can reach",
                fix="start one and set PREFECT_API_URL for this process",
            )
        try:
            return self._dask() if self.task_runner == "dask" else self._ray()
        except ModuleNotFoundError as error:
            raise UsageError(
                f"CKPTFLOW_TASK_RUNNER={self.task_runner} needs a package that is not installed",
                found=str(error),
                fix=f"pip install 'ckptflow[{self.task_runner}]'",
            ) from error

    def _dask(self) -> TaskRunner[Any]:
        import dask
        from prefect_dask.task_runners import DaskTaskRunner

        if self.cluster_address is not None:
            return DaskTaskRunner(address=self.cluster_address)
        # A run whose processes have all ended would wait for ever otherwise.
        dask.config.set({"distributed.scheduler.no-workers-timeout": "10 minutes"})
        # The engine bounds its memory itself. A thread per process, since each file has threads of its own.
        local = {"n_workers": self.files_at_once, "threads_per_worker": 1, "memory_limit": 0, "dashboard_address": None}
        return DaskTaskRunner(cluster_kwargs=local)

    def _ray(self) -> TaskRunner[Any]:
        import ray  # noqa: F401 (prefect-ray only notices that it is missing when it is used)
        from prefect_ray.task_runners import RayTaskRunner

        local = {"num_cpus": self.files_at_once, "include_dashboard": False}
        runner: TaskRunner[Any] = RayTaskRunner(self.cluster_address, None if self.cluster_address else local)
        return runner


@contextmanager
def one_server() -> Iterator[None]:
    """Inside the block, tasks that are submitted report to the server of this flow run, even to a temporary one.

    Each process would start another server otherwise.
    """
    context = FlowRunContext.get()
    if context is None:
        raise RuntimeError("one_server() belongs into a flow run")
    with temporary_settings({PREFECT_API_URL: str(context.client.api_url)}):
        yield
