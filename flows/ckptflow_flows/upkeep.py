"""The parameters of the flows that keep the disk in order, as the forms of the Prefect UI show them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field

from ckptflow.discovery.discover import SETTLE_SECONDS
from ckptflow.retention import KeepBest, RetentionPolicy, RetentionRequest
from ckptflow_flows.settings import Destinations, Section, destinations_of
from ckptflow_tasks.metrics import read_metric_events


class Best(Section):
    """Keep the best steps by a metric."""

    count: int = Field(1, ge=1, title="Number", description="How many of the best steps stay.")
    metric: str = Field(title="Metric", min_length=1, description="Its name in the files, such as `eval_loss`.")
    mode: Literal["min", "max"] = Field(title="Good is", description="Whether a small or a large value is good.")
    file: Path | None = Field(
        None,
        title="File",
        description="JSON or JSON lines with step and metric; default: `trainer_state.json` and `metrics.jsonl`.",
    )
    values: dict[int, float] = Field(
        default_factory=dict, title="Values", description="Global step and value; they come before all others."
    )
    events: bool = Field(
        True,
        title="Events",
        description="Also take values from `metrics` in events about the checkpoints, such as those of the callbacks.",
    )


class Keep(Section):
    """What to keep of each run. Each rule is enough to keep a step."""

    newest: int = Field(2, ge=1, title="Newest", description="How many of the newest complete steps stay.")
    every: int | None = Field(None, ge=1, title="Every", description="Steps that this number divides stay.")
    best: Best | None = Field(None, title="Best", description="The best steps by a metric stay.")
    pinned: tuple[str, ...] = Field(
        (), title="Pinned", description="Patterns of step directories that stay, such as `my-run/global_step_500`."
    )

    def policy(self) -> RetentionPolicy:
        """The library's policy."""
        best = None
        if self.best is not None:
            best = KeepBest(count=self.best.count, metric=self.best.metric, mode=self.best.mode)
        return RetentionPolicy(keep_newest=self.newest, keep_every=self.every, keep_best=best, pinned=self.pinned)


class Published(Section):
    """Where the models are published."""

    destinations: Destinations
    proven_at: Literal["all", "any"] = Field(
        "all",
        title="Proven at",
        description="Whether a model must be at all of them before its step may go, or at any.",
    )


def roots_title(roots: object) -> str:
    """Names of the roots, for the name of a run; from parameters as Prefect stores them."""
    named = roots.split(os.pathsep) if isinstance(roots, str) else list(roots) if isinstance(roots, Iterable) else []
    return ", ".join(Path(str(root)).name for root in named)


def retention_request(
    root: Path,
    keep: Keep,
    published: Published | None,
    settle_seconds: float = SETTLE_SECONDS,
) -> RetentionRequest:
    """What the library is asked about one root, with metrics that the server was told of.

    Raises:
        UsageError: a destination is not one, or is named twice.
    """
    told: tuple[tuple[Path, float], ...] = ()
    if keep.best is not None and keep.best.events:
        told = read_metric_events(root, keep.best.metric, root.name)
    return RetentionRequest(
        root=root,
        policy=keep.policy(),
        destinations=()
        if published is None
        else tuple(each.place() for each in destinations_of(published.destinations)),
        proven_at="all" if published is None else published.proven_at,
        settle_seconds=settle_seconds,
        metric_file=None if keep.best is None else keep.best.file,
        metric_values=() if keep.best is None else tuple(keep.best.values.items()),
        metric_events=told,
    )
