"""shrink-source: unused storage out of the trainer's own files, in place, before they are read."""

from __future__ import annotations

import time

from ckptflow.cli.console import format_bytes
from ckptflow.discovery.discover import judge
from ckptflow.errors import CorruptFileError, IncompleteCheckpointError
from ckptflow.formats.base import Location
from ckptflow.shrink import shrink_tree
from ckptflow_tasks import artifacts
from ckptflow_tasks.limits import LIMITS
from ckptflow_tasks.step import step


@step("shrink-source", run_name="shrink files of {label}", timeout_seconds=LIMITS.validate_timeout_seconds)
def shrink_source(location: Location, settle_seconds: float, label: str) -> int:
    """Shrink the checkpoint's torch files; gives the bytes that were saved.

    Training may resume from them, and a writer may still be at work: never before the settle time is over.
    """
    found = judge(location, settle_seconds, time.time())
    if found is None or found.state != "complete":
        raise IncompleteCheckpointError(
            "files are not shrunk while they may still be written",
            file=location.path,
            found="nothing" if found is None else f"{found.state}: {found.reason}",
            fix="run again once the save has settled",
        )
    report = shrink_tree(location.path)
    rows = [
        {
            "file": str(file.path),
            "before": format_bytes(file.before_bytes),
            "after": format_bytes(file.after_bytes),
            "outcome": file.outcome,
            "reason": file.reason or "",
        }
        for file in report.files
    ]
    total = {"before": format_bytes(report.before_bytes), "after": format_bytes(report.after_bytes)}
    rows.append({"file": "total", **total, "outcome": f"{format_bytes(report.saved_bytes)} saved", "reason": ""})
    artifacts.table("shrink-source", f"Files of {label} before and after", rows)
    if report.failures:
        first = report.failures[0]
        raise CorruptFileError("a file can't be shrunk; nothing of it was changed", file=first.path, found=first.reason)
    return report.saved_bytes
