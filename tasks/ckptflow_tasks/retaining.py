"""find steps, decide, delete: which steps of the runs may go, why, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefect import get_run_logger

from ckptflow.cli.console import format_bytes
from ckptflow.retention.policy import CheckpointFacts, Decision
from ckptflow.retention.removal import Removal, carry_out, remove_leftovers
from ckptflow.retention.survey import RetentionRequest, free_again, prove, survey, units_below
from ckptflow.retention.units import StepUnit
from ckptflow_tasks import artifacts
from ckptflow_tasks.limits import LIMITS
from ckptflow_tasks.step import step

#: A table of more rows is a burden to the browser; the log has the sums.
ROWS_SHOWN = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSteps:
    """The steps below a root, and the facts about each."""

    units: tuple[StepUnit, ...]
    facts: tuple[CheckpointFacts, ...]


@step("find steps", run_name="find steps of {label}", timeout_seconds=LIMITS.metadata_timeout_seconds)
def find_steps(request: RetentionRequest, label: str) -> FoundSteps:
    """List the steps with their state, size and metric."""
    units = units_below(request)
    facts = survey(request, units)
    rows = [
        {
            "step": str(each.location),
            "global step": each.global_step,
            "state": each.state,
            "size": format_bytes(each.freed_bytes),
            "metric": each.metric,
            "in use": each.in_use or each.named_by,
        }
        for each in facts[:ROWS_SHOWN]
    ]
    artifacts.table("retention-steps", f"Steps of {label}", rows)
    return FoundSteps(units=tuple(units), facts=tuple(facts))


@step("decide", run_name="decide on {label}", timeout_seconds=LIMITS.metadata_timeout_seconds)
def decide(request: RetentionRequest, found: FoundSteps, label: str) -> list[Decision]:
    """Apply the policy, and look at the destinations for what it lets go."""
    decisions = prove(request, found.units, found.facts)
    rows = [
        {
            "decision": each.action,
            "step": str(each.location),
            "global step": each.global_step,
            "size": format_bytes(each.bytes),
            "why": "; ".join(each.reasons),
        }
        for each in decisions[:ROWS_SHOWN]
    ]
    artifacts.table("retention", f"What stays and what goes of {label}", rows)
    sizes = {action: sum(d.bytes for d in decisions if d.action == action) for action in ("keep", "delete")}
    artifacts.markdown("retention-picture", f"Disk space of {label}", artifacts.pie("kept and deleted", sizes))
    get_run_logger().info("%s: %s stay, %s may go", label, *(format_bytes(size) for size in sizes.values()))
    return decisions


@step("delete", run_name="delete old steps of {label}", timeout_seconds=LIMITS.file_timeout_seconds)
def delete_steps(
    request: RetentionRequest, found: FoundSteps, decisions: Sequence[Decision], label: str
) -> list[Removal]:
    """Delete what was decided to go, after what killed runs left half deleted."""
    removals = [*remove_leftovers(request.root), *carry_out(decisions, free_again(found.units))]
    rows = [
        {
            "step": str(each.location),
            "outcome": each.outcome,
            "freed": format_bytes(each.freed_bytes),
            "detail": each.detail,
        }
        for each in removals[:ROWS_SHOWN]
    ]
    artifacts.table("retention-deleted", f"What became of old steps of {label}", rows)
    for removal in removals:
        if removal.outcome == "failed":
            get_run_logger().error("%s", removal.detail)
    return removals
