"""seed: a model directory with fresh weights."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger

from ckptflow.cli.console import format_bytes
from ckptflow.seeding.request import SeedRequest
from ckptflow.seeding.seed import seed_model
from ckptflow_tasks import artifacts
from ckptflow_tasks.limits import LIMITS
from ckptflow_tasks.step import step


@step("seed", run_name="seed {label}", timeout_seconds=LIMITS.compare_timeout_seconds)
def make_seed(request: SeedRequest, label: str) -> dict[str, Any]:
    """Draw and write all weight files; gives the facts that the flow returns."""
    record = seed_model(request)
    drawn: dict[str, list[int]] = {}
    for tensor in record["tensors"].values():
        sizes = drawn.setdefault(f"{tensor['drawn']} ({tensor['dtype']})", [])
        sizes.append(tensor["nbytes"])
    rows = [
        {"filled with": rule, "tensors": len(sizes), "size": format_bytes(sum(sizes))} for rule, sizes in drawn.items()
    ]
    artifacts.table("seed-model", f"Fresh weights of {label}, seed {request.seed}, at {request.out}", rows)
    for note in record["notes"]:
        get_run_logger().warning("%s", note)
    weights = [file for name, file in record["files"].items() if name.endswith(".safetensors")]
    return {
        "out": str(request.out),
        "fingerprint": record["fingerprint"],
        "tensors": len(record["tensors"]),
        "files": len(weights),
        "bytes": sum(file["bytes"] for file in weights),
    }
