"""What retention decides, from facts alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptflow.errors import UsageError
from ckptflow.retention import CheckpointFacts, KeepBest, RetentionPolicy, plan_retention

RUN = Path("/runs/sft")


def facts(step: int | None, run: Path = RUN, **changes: Any) -> CheckpointFacts:
    """A complete, published step that nobody uses."""
    values = {
        "location": run / f"global_step_{step}",
        "run": run,
        "global_step": step,
        "state": "complete",
        "state_reason": "all there",
        "freed_bytes": 100,
        "newest_mtime": 1.0,
        "file_count": 3,
        "unproven": None,
    }
    return CheckpointFacts(**{**values, **changes})


def deleted(found: list[CheckpointFacts], policy: RetentionPolicy) -> list[int | None]:
    return [d.global_step for d in plan_retention(found, policy) if d.action == "delete"]


def reasons(found: list[CheckpointFacts], policy: RetentionPolicy, step: int) -> str:
    (decision,) = [d for d in plan_retention(found, policy) if d.global_step == step]
    return "; ".join(decision.reasons)


def test_the_newest_stay_and_numbers_sort_as_numbers() -> None:
    found = [facts(step) for step in (9000, 10000, 900, 1000)]
    assert deleted(found, RetentionPolicy()) == [900, 1000]
    assert deleted(found, RetentionPolicy(keep_newest=1)) == [900, 1000, 9000]
    assert deleted(found, RetentionPolicy(keep_newest=9)) == []


@pytest.mark.parametrize("number", [0, -1, -100, True, 1.5])
@pytest.mark.parametrize("name", ["keep_newest", "keep_every"])
def test_a_number_that_is_not_positive_is_refused_and_never_means_all(name: str, number: Any) -> None:
    with pytest.raises(UsageError, match="not a positive number"):
        RetentionPolicy(**{name: number})


@pytest.mark.parametrize(
    ("count", "metric", "mode"), [(0, "loss", "min"), (-1, "loss", "min"), (1, " ", "min"), (1, "loss", "low")]
)
def test_a_best_that_says_nothing_is_refused(count: int, metric: str, mode: Any) -> None:
    with pytest.raises(UsageError):
        KeepBest(count=count, metric=metric, mode=mode)


def test_an_empty_pin_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        RetentionPolicy(pinned=("",))


def test_each_run_is_judged_by_itself() -> None:
    other = Path("/runs/rl")
    found = [facts(step) for step in (1, 2, 3)] + [facts(step, run=other) for step in (100, 200)]
    assert deleted(found, RetentionPolicy(keep_newest=1)) == [100, 1, 2]


def test_every_kth_global_step_stays() -> None:
    found = [facts(step) for step in (100, 150, 200, 250, 300)]
    assert deleted(found, RetentionPolicy(keep_newest=1, keep_every=100)) == [150, 250]
    assert "a multiple of 100 steps" in reasons(found, RetentionPolicy(keep_every=100), 200)


def test_pins_match_the_step_or_run_and_step() -> None:
    found = [facts(step) for step in (10, 20, 30)] + [facts(10, run=Path("/runs/rl"))]
    assert deleted(found, RetentionPolicy(keep_newest=1, pinned=("sft/global_step_1*",))) == [20]
    assert deleted(found, RetentionPolicy(keep_newest=1, pinned=("global_step_?0",))) == []


@pytest.mark.parametrize(("mode", "kept"), [("min", 20), ("max", 30)])
def test_the_best_by_a_metric_stays(mode: Any, kept: int) -> None:
    losses = {10: 0.5, 20: 0.25, 30: 0.75, 40: 0.5}
    found = [facts(step, metric=loss) for step, loss in losses.items()]
    policy = RetentionPolicy(keep_newest=1, keep_best=KeepBest(count=1, metric="loss", mode=mode))
    assert deleted(found, policy) == sorted({10, 20, 30} - {kept})


def test_a_metric_that_is_not_a_number_is_never_the_best() -> None:
    found = [
        facts(10, metric=float("nan")),
        facts(20, metric=0.5),
        facts(30, metric=float("-inf")),
        facts(40, metric=1),
    ]
    policy = RetentionPolicy(keep_newest=1, keep_best=KeepBest(count=1, metric="loss", mode="min"))
    assert deleted(found, policy) == [10, 30]


def test_steps_newer_than_all_that_were_measured_wait_for_their_evaluation() -> None:
    found = [facts(10), facts(20, metric=0.5), facts(30), facts(40)]
    policy = RetentionPolicy(keep_newest=1, keep_best=KeepBest(count=1, metric="loss", mode="min"))
    assert deleted(found, policy) == [10]
    assert "loss not measured yet" in reasons(found, policy, 30)


def test_a_metric_that_no_step_has_keeps_the_whole_run() -> None:
    policy = RetentionPolicy(keep_newest=1, keep_best=KeepBest(count=1, metric="lsos", mode="min"))
    assert deleted([facts(step) for step in (1, 2, 3)], policy) == []


def test_an_incomplete_step_is_neither_deleted_nor_counted_among_the_newest() -> None:
    found = [facts(10), facts(20, state="incomplete", state_reason="rank 1 is missing"), facts(5)]
    assert deleted(found, RetentionPolicy(keep_newest=1)) == [5]
    assert "rank 1 is missing" in reasons(found, RetentionPolicy(keep_newest=1), 20)


@pytest.mark.parametrize(
    "obstacle",
    [
        {"state": "in-progress"},
        {"state": "incomplete"},
        {"in_use": "process 1"},
        {"named_by": "latest names it"},
        {"unproven": "no marker"},
        {"global_step": None},
    ],
)
def test_one_obstacle_is_enough_to_stay(obstacle: dict[str, Any]) -> None:
    found = [facts(1, **obstacle), facts(2), facts(3)]
    assert deleted(found, RetentionPolicy(keep_newest=1)) == [2]


maybe = st.none() | st.just("something")
some_facts = st.builds(
    facts,
    st.none() | st.integers(0, 30),
    run=st.sampled_from([RUN, Path("/runs/rl")]),
    state=st.sampled_from(["complete", "complete", "complete", "incomplete", "in-progress", "published"]),
    metric=st.none() | st.floats(),
    in_use=maybe,
    named_by=maybe,
    unproven=maybe,
)
policies = st.builds(
    RetentionPolicy,
    keep_newest=st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 10),
    keep_best=st.none()
    | st.builds(KeepBest, count=st.integers(1, 3), metric=st.just("loss"), mode=st.sampled_from(["min", "max"])),
    pinned=st.lists(st.sampled_from(["global_step_1*", "rl/*", "*_7"])).map(tuple),
)


@given(st.lists(some_facts, max_size=12, unique_by=lambda f: f.location), policies)
def test_no_policy_ever_deletes_what_must_stay(found: list[CheckpointFacts], policy: RetentionPolicy) -> None:
    decisions = plan_retention(found, policy)
    assert sorted(str(d.location) for d in decisions) == sorted(str(f.location) for f in found)
    gone = [d.facts for d in decisions if d.action == "delete"]
    for each in gone:
        assert each.state in ("complete", "published")
        assert (each.in_use, each.named_by, each.unproven) == (None, None, None)
        assert each.global_step is not None
        assert not any(each.location.match(pattern) for pattern in policy.pinned)
        assert policy.keep_every is None or each.global_step % policy.keep_every
        complete = {
            f.global_step
            for f in found
            if f.run == each.run and f.state in ("complete", "published") and f.global_step is not None
        }
        assert len([step for step in complete if step > each.global_step]) >= policy.keep_newest


@given(st.sets(st.integers(0, 10**7), max_size=20), st.integers(1, 5))
def test_where_nothing_speaks_against_it_exactly_the_newest_stay(steps: set[int], keep: int) -> None:
    gone = deleted([facts(step) for step in steps], RetentionPolicy(keep_newest=keep))
    assert gone == sorted(steps)[:-keep]


@given(st.sets(st.integers(0, 10**6), min_size=1, max_size=12), st.data())
def test_the_best_is_the_one_that_min_and_max_find(steps: set[int], data: st.DataObject) -> None:
    values = {step: data.draw(st.floats(-1e9, 1e9)) for step in sorted(steps)}
    for mode, choose in (("min", min), ("max", max)):
        policy = RetentionPolicy(keep_newest=1, keep_best=KeepBest(count=1, metric="loss", mode=mode))  # type: ignore[arg-type]
        gone = deleted([facts(step, metric=value) for step, value in values.items()], policy)
        best = choose(values.values())
        kept = {max(step for step, value in values.items() if value == best), max(steps)}
        assert gone == sorted(steps - kept)
