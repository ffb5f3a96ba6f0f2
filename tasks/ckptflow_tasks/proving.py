"""validate: prove the model directory against the checkpoint, by another path than the one that wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefect import get_run_logger

from ckptflow.cli.console import format_bytes
from ckptflow.validate.report import Check, Figure, RoundingHistogram, ValidationReport
from ckptflow.validate.verify import VerifyOptions, verify
from ckptflow_tasks import artifacts
from ckptflow_tasks.limits import LIMITS
from ckptflow_tasks.step import GPU, step

BARS = 8
WIDEST_CELL = 72


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """A model directory that equals its source.

    Attributes:
        directory: where it is.
        checks: number of checks, all of them passed or skipped with a reason.
        elements_compared: elements that equal torch's cast of the source bit for bit.
    """

    directory: str
    checks: int
    elements_compared: int


@step("validate", run_name="validate {label}", timeout_seconds=LIMITS.validate_timeout_seconds, tags=(GPU,))
def validate_model(directory: str, source: Path, label: str, forward: bool, options: VerifyOptions) -> Proven:
    """Compare every element with the source, the names and shapes with the model of config.json, and run the model."""
    report = verify(Path(directory), against=source, forward=forward, options=options)
    show_report(report, label)
    report.raise_if_failed()
    get_run_logger().info(
        "%d checks held; %s elements equal torch's cast of the source",
        len(report.checks),
        f"{report.elements_compared:,}",
    )
    return Proven(directory=directory, checks=len(report.checks), elements_compared=report.elements_compared)


def show_report(report: ValidationReport, label: str) -> None:
    """One table of checks, and a picture of the rounding and of the bytes."""
    artifacts.table("validate", f"Checks of {label}", check_rows(report.checks))
    artifacts.markdown("validate-picture", f"Rounding and bytes of {label}", report_markdown(report, label))


def check_rows(checks: Sequence[Check]) -> list[dict[str, str]]:
    """The table of checks, narrow enough for the page."""
    return [
        {"check": c.name, "status": c.status, "figures": _short(_figures(c)), "detail": _short(c.detail)}
        for c in checks
    ]


def report_markdown(report: ValidationReport, label: str) -> str:
    """The report as markdown with Mermaid pictures."""
    verdict = "passed" if report.passed else "failed"
    parts = [
        f"# {label}: validation {verdict}",
        *(f"- **{failure.name}**: {failure.detail}" for failure in report.failures),
        f"{report.tensors_compared} tensors and {report.elements_compared:,} elements were compared with the source in "
        f"{report.seconds:.1f} s; {report.differing_elements:,} differ from torch's own cast.",
        _dtypes(report.bytes_by_dtype),
        "" if report.rounding_histogram is None else _histogram(report.rounding_histogram),
        _check_table(report.checks),
    ]
    return "\n\n".join(part for part in parts if part)


def _check_table(checks: Sequence[Check]) -> str:
    """All checks in full; the UI wraps these cells, and those of a table artifact it does not."""
    rows = [(check.name, check.status, check.detail, _figures(check)) for check in checks]
    lines = [" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows]
    return "\n".join(("check | status | detail | figures", "--- | --- | --- | ---", *lines))


def _figures(check: Check) -> str:
    return ", ".join(f"{name} {_figure(value)}" for name, value in check.figures.items())


def _figure(value: Figure) -> str:
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _short(text: str) -> str:
    return text if len(text) <= WIDEST_CELL else f"{text[: WIDEST_CELL - 1]}…"


def _dtypes(bytes_by_dtype: Mapping[str, int]) -> str:
    if len(bytes_by_dtype) < 2:
        return "".join(f"All {format_bytes(size)} are {name}." for name, size in bytes_by_dtype.items())
    return artifacts.pie("Bytes by dtype", bytes_by_dtype)


def _histogram(histogram: RoundingHistogram) -> str:
    total = max(histogram.sampled, 1)
    width = -(-len(histogram.counts) // BARS)
    starts = range(0, len(histogram.counts), width)
    uppers = [histogram.edges[min(start + width, len(histogram.counts))] for start in starts]
    shares = [round(100.0 * sum(histogram.counts[start : start + width]) / total, 3) for start in starts]
    text = f"{100.0 * histogram.exact / total:.1f} % of {total:,} sampled elements were not changed by the cast at all."
    labels = [f"{100.0 * upper:.2f} %" for upper in uppers]
    return text + "\n\n" + artifacts.bars("Relative rounding error up to …", labels, shares, "% of elements")
