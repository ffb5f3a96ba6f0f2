"""inspect, shrink, cast: what is there, what of it is needed, and in which dtype. Nothing is written yet."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from prefect import get_run_logger

from ckptflow.cli.console import format_bytes
from ckptflow.inspection import summarize
from ckptflow.plan import ConsolidationPlan
from ckptflow.request import ConvertRequest
from ckptflow_tasks import artifacts
from ckptflow_tasks.limits import LIMITS
from ckptflow_tasks.planning import plan_anew, planned
from ckptflow_tasks.step import step


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """What the later steps need to know; they hand it on, so that the UI draws them in their order.

    Attributes:
        fingerprint: identity of source and recipe.
        weight_files: names of the weight files that will be written.
        output_bytes: bytes of all output tensors.
    """

    fingerprint: str
    weight_files: tuple[str, ...]
    output_bytes: int

    def position(self, number: int) -> str:
        """``2 of 5``, for weight file 1."""
        return f"{number + 1} of {len(self.weight_files)}"


@step("inspect", run_name="inspect {label}", timeout_seconds=LIMITS.metadata_timeout_seconds)
def inspect_checkpoint(request: ConvertRequest, label: str) -> Inspected:
    """Read the checkpoint's metadata and plan every output byte."""
    conversion = plan_anew(request)
    summary = summarize(conversion.manifest)
    facts = summary.facts()
    dtypes = ", ".join(f"{name} {format_bytes(size)}" for name, size in summary.bytes_by_dtype.items())
    rows = [
        ("layout", facts["layout"]),
        ("ranks", facts["world_size"]),
        ("device mesh", facts["mesh"] or "none"),
        ("global step", facts["global_step"]),
        ("tensors", facts["tensor_count"]),
        ("parameters", f"{summary.parameters:,}"),
        ("dtypes", dtypes),
        ("tensor bytes", format_bytes(facts["tensor_bytes"])),
        ("storage bytes", format_bytes(facts["storage_bytes"])),
        ("wasted storage bytes", format_bytes(facts["wasted_bytes"])),
        ("tied weights", ", ".join(f"{alias} is {owner}" for alias, owner in conversion.plan.ties.items()) or "none"),
        ("left out", len(conversion.plan.left_out)),
        ("path", facts["path"]),
    ]
    artifacts.table("inspect", f"What {label} holds", [{"what": what, "value": value} for what, value in rows])
    get_run_logger().info(
        "%s of %s ranks: %s parameters in %s", facts["layout"], facts["world_size"], f"{summary.parameters:,}", dtypes
    )
    return Inspected(
        fingerprint=conversion.fingerprint,
        weight_files=tuple(file.name for file in conversion.plan.files),
        output_bytes=conversion.plan.nbytes,
    )


@step("shrink", run_name="shrink {label}", timeout_seconds=LIMITS.metadata_timeout_seconds)
def shrink_plan(request: ConvertRequest, inspected: Inspected, label: str) -> Inspected:
    """Show which bytes of the checkpoint the model needs."""
    conversion = planned(request, inspected.fingerprint)
    manifest, plan = conversion.manifest, conversion.plan
    needed = sum(t.source.nbytes for t in plan.tensors)
    files = sum(f.nbytes for f in manifest.files)
    left_out = sum(entry.nbytes for entry in plan.left_out)
    rows = [
        _row("files with weights", files, needed),
        _row("storages behind the tensors", manifest.storage_bytes, manifest.storage_bytes - manifest.wasted_bytes),
        _row("tied copies", needed + sum(e.second.nbytes for e in plan.equal if e.fqn in plan.ties), needed),
        _row("entries that are no weights", left_out, 0),
    ]
    artifacts.table("shrink", f"Bytes of {label} that the model needs", rows)
    return inspected


def _row(what: str, before: int, after: int) -> dict[str, str]:
    return {
        "what": what,
        "before": format_bytes(before),
        "after": format_bytes(after),
        "saved": format_bytes(max(0, before - after)),
    }


@step("cast", run_name="cast {label}", timeout_seconds=LIMITS.metadata_timeout_seconds)
def cast_plan(request: ConvertRequest, inspected: Inspected, label: str) -> Inspected:
    """Show which dtype each tensor gets. The cast itself happens while merging."""
    plan = planned(request, inspected.fingerprint).plan
    artifacts.table("cast", f"Dtypes of {label} before and after", _cast_rows(plan))
    kept = [t for t in plan.tensors if t.kept_reason is not None]
    if kept:
        rows = [{"tensor": t.fqn, "dtype": t.dtype.name, "reason": t.kept_reason} for t in kept[:200]]
        artifacts.table("kept-dtypes", f"Tensors of {label} that keep their dtype", rows)
    return inspected


def _cast_rows(plan: ConsolidationPlan) -> list[dict[str, str | int]]:
    tensors: Counter[tuple[str, str]] = Counter()
    before: Counter[tuple[str, str]] = Counter()
    after: Counter[tuple[str, str]] = Counter()
    for tensor in plan.tensors:
        pair = (tensor.source.dtype.name, tensor.dtype.name)
        tensors[pair] += 1
        before[pair] += tensor.source.nbytes
        after[pair] += tensor.nbytes
    return [
        {
            "from": pair[0],
            "to": pair[1],
            "tensors": count,
            "before": format_bytes(before[pair]),
            "after": format_bytes(after[pair]),
        }
        for pair, count in tensors.most_common()
    ]
