"""A run whose steps are all published, and how retention is asked about it; loaded by ``pytest_plugins``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptflow.publish import Destination
from ckptflow.retention import Decision, RetentionPolicy, RetentionRequest, plan_root

STEPS = (8, 9, 10, 11)


@pytest.fixture(scope="session")
def published_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``runs/sft`` with four whole steps of two ranks and an optimizer each, all published under ``models``."""
    from checkpoints import write_fsdp_step
    from retained import age, publish

    base = tmp_path_factory.mktemp("published-steps")
    for step in STEPS:
        directory = write_fsdp_step(base / "runs" / "sft", step)
        (directory / "actor" / "optim_world_size_2_rank_0.pt").write_bytes(bytes(50_000))
        publish(directory, f"file://{base}/models", base / "scratch")
    age(base / "runs")
    return base


@pytest.fixture
def base(published_steps: Path, tmp_path: Path) -> Path:
    """A copy of these steps and models, of the test's own."""
    for name in ("runs", "models"):
        shutil.copytree(published_steps / name, tmp_path / name)
    return tmp_path


def request(base: Path, **policy: object) -> RetentionRequest:
    """To keep the newest step, and what else the policy says."""
    return RetentionRequest(
        root=base / "runs",
        policy=RetentionPolicy(**{"keep_newest": 1, **policy}),  # type: ignore[arg-type]
        destinations=(Destination(uri=f"file://{base}/models"),),
    )


def planned(base: Path, **policy: object) -> dict[int | None, Decision]:
    """The decision about each step."""
    return {decision.global_step: decision for decision in plan_root(request(base, **policy))}


def doomed(base: Path, **policy: object) -> list[int | None]:
    """The steps that would go."""
    return [step for step, decision in planned(base, **policy).items() if decision.action == "delete"]


def why(base: Path, step: int) -> str:
    """The reasons of the decision about a step."""
    return "; ".join(planned(base)[step].reasons)


def command(base: Path, *options: str) -> list[str]:
    """The same request for the command line."""
    return ["retain", str(base / "runs"), "--keep", "1", "--to", f"file://{base}/models", *options]
