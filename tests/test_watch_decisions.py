"""What watch and sweep do about a checkpoint that is not published, by how its last run ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptflow.formats.base import Location
from ckptflow_flows.decisions import LastRun, Making, Patience, attempt_key, base_key, decide
from ckptflow_flows.settings import Destination, Machine, Recipe

NOW = 1_000_000.0
PATIENCE = Patience(pending_seconds=900, retry_seconds=300)
MAKING = Making(destinations=(Destination(uri="s3://bucket/models"),))
LOCATION = Location(layout="fsdp", path=Path("/data/exp/global_step_10/actor"), root=Path("/data/exp"), global_step=10)


def last(ended: str, *, attempt: int = 1, since: float = NOW - 60) -> LastRun:
    return LastRun(attempt=attempt, ended=ended, started_at=NOW - 600, since=since)  # type: ignore[arg-type]


def decided(run: LastRun | None, newest_mtime: float = NOW - 10_000) -> tuple[str, int]:
    decision = decide(run, newest_mtime, PATIENCE, NOW)
    return decision.action, decision.attempt


def test_a_new_checkpoint_gets_its_first_run() -> None:
    assert decided(None) == ("start", 1)


@pytest.mark.parametrize("ended", ["active", "pending"])
def test_a_run_that_has_not_ended_is_waited_for_whatever_happens_to_the_files(ended: str) -> None:
    assert decided(last(ended), newest_mtime=NOW)[0] == "wait"


def test_a_run_that_stays_pending_is_lost() -> None:
    assert decided(last("pending", since=NOW - 901)) == ("declare-lost", 2)


def test_a_crashed_run_is_started_again_at_once_and_later_more_slowly() -> None:
    assert decided(last("crashed")) == ("start", 2)
    assert decided(last("crashed", attempt=2)) == ("wait", 0)
    assert decided(last("crashed", attempt=2, since=NOW - 601)) == ("start", 3)


def test_a_failed_run_is_tried_again_with_growing_waits() -> None:
    waits = [PATIENCE.wait_seconds(attempt) for attempt in (1, 2, 3, 20)]
    assert waits == [300, 600, 1200, 6 * 3600]
    assert decided(last("failed")) == ("wait", 0)
    assert decided(last("failed", since=NOW - 301)) == ("start", 2)


@pytest.mark.parametrize("ended", ["refused", "cancelled"])
def test_a_refused_or_cancelled_checkpoint_is_left_until_its_files_change(ended: str) -> None:
    assert decided(last(ended, since=0)) == ("leave", 0)
    assert decided(last(ended), newest_mtime=NOW - 30) == ("start", 2)


@pytest.mark.parametrize(("ended", "action"), [("refused", "leave"), ("failed", "wait"), ("completed", "wait")])
def test_files_from_the_future_do_not_start_run_after_run(ended: str, action: str) -> None:
    """A trainer's clock that is ahead, or files that were copied with such times: they are newer than any run."""
    assert decided(last(ended), newest_mtime=NOW + 3600)[0] == action


def test_a_model_that_vanished_from_its_destination_is_made_again() -> None:
    assert decided(last("completed", since=NOW - 301)) == ("start", 2)


def test_keys_tell_checkpoints_recipes_and_tries_apart_but_not_machines() -> None:
    key = base_key(LOCATION, MAKING)
    assert key.startswith("exp-step-10-")
    other_machine = MAKING.model_copy(update={"machine": Machine(threads=1, device="cpu")})
    assert base_key(LOCATION, other_machine) == key
    other_recipe = MAKING.model_copy(update={"recipe": Recipe(dtype="float16")})
    other_place = MAKING.model_copy(update={"destinations": (Destination(uri="s3://bucket/other"),)})
    other_run = Location(layout="fsdp", path=Path("/else/exp/global_step_10/actor"), root=Path("/else"), global_step=10)
    keys = {key, base_key(LOCATION, other_recipe), base_key(LOCATION, other_place), base_key(other_run, MAKING)}
    assert len(keys) == 4
    both = (Destination(uri="s3://bucket/other"), *MAKING.destinations)
    two_places, same_places = (MAKING.model_copy(update={"destinations": each}) for each in (both, both[::-1]))
    assert base_key(LOCATION, two_places) == base_key(LOCATION, same_places)
    assert base_key(LOCATION, two_places) not in keys
    # What was refused because another model is there is not refused any more.
    replacing = Making(destinations=(MAKING.destinations[0].model_copy(update={"overwrite": True}),))
    assert base_key(LOCATION, replacing) not in {*keys, base_key(LOCATION, two_places)}
    assert len({attempt_key(key, attempt) for attempt in (1, 2, 12)}) == 3
