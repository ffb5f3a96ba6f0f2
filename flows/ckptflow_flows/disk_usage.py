"""disk-usage: who fills the disk, as a table and a picture, with what shrinking and retention would free."""

from __future__ import annotations

from typing import Any

from prefect import flow, runtime
from prefect.states import Completed

from ckptflow.cli.console import format_bytes
from ckptflow_flows.sweep import Roots, roots_of
from ckptflow_flows.upkeep import Keep, Published, retention_request, roots_title
from ckptflow_tasks.usage import find_savings, measure


def _flow_run_name() -> str:
    return f"disk-usage {roots_title(runtime.flow_run.parameters['roots'])}"


@flow(name="disk-usage", flow_run_name=_flow_run_name, persist_result=False, validate_parameters=True)
def disk_usage(
    roots: Roots,
    published: Published | None = None,
    keep: Keep = Keep(),  # noqa: B008 - frozen
    shrink: bool = True,
) -> Any:
    """Sum up disk space by run, step and kind of file. Changes nothing.

    Args:
        roots: directories that hold runs.
        published: where their models are published, to tell what retention would free now.
        keep: what retention would keep of each run.
        shrink: look into torch files for bytes that no tensor uses.
    """
    sizes = []
    for root in roots_of(roots):
        usage = measure(root, root.name)
        find_savings(retention_request(root, keep, published), root.name, shrink)
        sizes.append(f"{root.name}: {format_bytes(usage.allocated_bytes)}")
    return Completed(message=", ".join(sizes))
