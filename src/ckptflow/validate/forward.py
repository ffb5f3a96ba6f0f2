"""Does transformers load the output, and does the model compute? In a process of its own, with a real timeout."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from ckptflow.processes.askprocess import run_module
from ckptflow.validate.report import Check

NAME = "forward pass"
OVERHEAD_BYTES = 700 * 10**6
"""torch, transformers and the activations of a few tokens."""
GROWTH = 1.3
"""Peak of from_pretrained over the bytes of the weights, with room to spare."""


def check_forward(out: Path, weight_bytes: int, budget_bytes: int | None, timeout_seconds: float) -> Check:
    """Load with ``from_pretrained`` and run a few tokens on the CPU, twice.

    Args:
        out: the model directory.
        weight_bytes: bytes of all tensors.
        budget_bytes: memory that the process may take; None for half of what is free.
        timeout_seconds: when it is killed.
    """
    fits = memory_check(weight_bytes, budget_bytes)
    if fits.status == "skipped":
        return fits
    answer = _ask(out, timeout_seconds)
    figures = {**fits.figures, **answer.get("figures", {})}
    return Check(name=NAME, status=answer["status"], detail=answer["detail"], figures=figures)


def memory_check(weight_bytes: int, budget_bytes: int | None) -> Check:
    """Whether a model of that size may be loaded: ``skipped`` says that it may not; budget as for ``check_forward``."""
    budget = available_bytes() // 2 if budget_bytes is None else budget_bytes
    needed = int(weight_bytes * GROWTH) + OVERHEAD_BYTES
    figures: dict[str, str | int | float] = {"estimated bytes": needed, "budget bytes": budget}
    detail = f"about {needed / 1e9:.1f} GB of memory are needed, {budget / 1e9:.1f} GB may be used"
    return Check(name=NAME, status="skipped" if needed > budget else "passed", detail=detail, figures=figures)


def _ask(out: Path, timeout_seconds: float) -> dict[str, Any]:
    try:
        done = run_module("ckptflow.validate.forward_process", out, "", timeout_seconds)
    except TimeoutError:
        return {"status": "failed", "detail": f"no answer in {timeout_seconds:g} s"}
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return {"status": "failed", "detail": f"the process was ended by {name}; it may have run out of memory"}
    if done.returncode > 0:
        return {"status": "failed", "detail": _last_lines(done.stderr)}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _last_lines(text: str, count: int = 4) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return " / ".join(lines[-count:])[-1000:]


def available_bytes() -> int:
    """Memory that a new process can get without swapping, cgroup limit included."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return free if limit == "max" else min(free, max(0, int(limit) - used))
    except (OSError, ValueError):  # not Linux, or no cgroup v2
        return free
