"""retain: delete old steps whose models are proven to be published. Safe to kill and to run twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import flow, runtime
from prefect.states import Completed, Failed

from ckptflow.cli.console import format_bytes
from ckptflow.discovery.discover import SETTLE_SECONDS
from ckptflow.retention import Removal
from ckptflow_flows.sweep import Roots, roots_of
from ckptflow_flows.upkeep import Keep, Published, retention_request, roots_title
from ckptflow_tasks.retaining import decide, delete_steps, find_steps


def _flow_run_name() -> str:
    return f"retain {roots_title(runtime.flow_run.parameters['roots'])}"


@flow(name="retain", flow_run_name=_flow_run_name, persist_result=False, validate_parameters=True)
def retain(
    roots: Roots,
    published: Published,
    keep: Keep = Keep(),  # noqa: B008 - frozen
    settle_seconds: float = SETTLE_SECONDS,
    dry_run: bool = False,
) -> Any:
    """Keep the newest steps, every K-th, the best and the pinned ones, and all that is not proven to be published.

    Args:
        roots: directories that hold runs.
        published: where their models are published.
        keep: what to keep of each run.
        settle_seconds: time without a change before a step counts as complete.
        dry_run: decide and show, but delete nothing.
    """
    total, doomed_bytes, doomed, removals = 0, 0, 0, list[Removal]()
    for root in roots_of(roots):
        request = retention_request(root, keep, published, settle_seconds)
        found = find_steps(request, root.name)
        decisions = decide(request, found, root.name)
        total += len(decisions)
        going = [decision for decision in decisions if decision.action == "delete"]
        doomed, doomed_bytes = doomed + len(going), doomed_bytes + sum(decision.bytes for decision in going)
        if not dry_run:
            removals += delete_steps(request, found, decisions, root.name)
    if dry_run:
        message = f"{doomed} of {total} steps would go, {format_bytes(doomed_bytes)}"
        return Completed(name="DryRun", message=message)
    return _state(removals, total)


def _state(removals: Sequence[Removal], total: int) -> Any:
    failed = [removal for removal in removals if removal.outcome == "failed"]
    if failed:
        return Failed(message=f"{len(failed)} of {total} steps can't be deleted: {failed[0].detail}")
    deleted = sum(1 for removal in removals if removal.outcome == "deleted")
    freed = format_bytes(sum(removal.freed_bytes for removal in removals))
    return Completed(message=f"{deleted} of {total} steps deleted, {freed} free now")
