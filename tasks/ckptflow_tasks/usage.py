"""measure, savings: who fills the disk, and what could be freed."""

from __future__ import annotations

from pathlib import Path

from prefect import get_run_logger

from ckptflow.cli.console import format_bytes
from ckptflow.diskusage.report import DiskUsage, disk_usage, savings_of_retention, savings_of_shrinking
from ckptflow.retention.survey import RetentionRequest
from ckptflow_tasks import artifacts
from ckptflow_tasks.limits import LIMITS
from ckptflow_tasks.step import step

ROWS_SHOWN = 500
BARS_SHOWN = 10
GB = 1e9


@step("measure", run_name="measure {label}", timeout_seconds=LIMITS.metadata_timeout_seconds)
def measure(root: Path, label: str) -> DiskUsage:
    """Sum up by run, step and kind of file; a table, and a picture."""
    usage = disk_usage(root)
    table = usage.by_step()
    largest = sorted(table, key=lambda place: -sum(table[place].values()))[:ROWS_SHOWN]
    rows = [
        {
            "run": usage.name_of(run),
            "step": "beside" if global_step is None else global_step,
            **{kind: format_bytes(size) for kind, size in table[run, global_step].items()},
            "sum": format_bytes(sum(table[run, global_step].values())),
        }
        for run, global_step in largest
    ]
    artifacts.table("disk-usage", f"Disk space of {label}, largest first", rows)
    artifacts.markdown("disk-usage-picture", f"Who fills the disk below {label}", picture(usage))
    for directory in usage.unreadable:
        get_run_logger().warning("not counted, it can't be read: %s", directory)
    get_run_logger().info("%s take %s", label, format_bytes(usage.allocated_bytes))
    return usage


def picture(usage: DiskUsage) -> str:
    """Mermaid: a pie of the kinds of files, and bars of the largest runs, or of the steps where there is one run."""
    kinds = artifacts.pie("by kind of file", {str(kind): size for kind, size in usage.by_kind().items()})
    runs = usage.by_run()
    if len(runs) > 1:
        labels, sizes = [usage.name_of(run) for run in runs], list(runs.values())
        title = "largest runs"
    else:
        steps = {place: sum(kinds.values()) for place, kinds in usage.by_step().items()}
        largest = sorted(sorted(steps, key=lambda place: -steps[place])[:BARS_SHOWN], key=lambda place: place[1] or -1)
        labels, sizes = ["beside" if step is None else str(step) for _, step in largest], [steps[p] for p in largest]
        title = "largest steps"
    bars = artifacts.bars(title, labels[:BARS_SHOWN], [size / GB for size in sizes[:BARS_SHOWN]], "GB")
    return f"{kinds}\n\n{bars}"


@step("savings", run_name="savings of {label}", timeout_seconds=LIMITS.compare_timeout_seconds)
def find_savings(request: RetentionRequest, label: str, shrink: bool) -> None:
    """What shrinking and retention would free; deletes nothing."""
    savings = savings_of_retention(request)
    if shrink:
        savings.insert(0, savings_of_shrinking(request.root))
    rows = [{"what": each.what, "would free": format_bytes(each.freed_bytes), "count": each.count} for each in savings]
    artifacts.table("disk-savings", f"What could be freed of {label}", rows)
