"""A run waits for a server that is too busy or away to answer whether a slot is free, and for nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError

from ckptflow_tasks.step import SLOT_TRIES, with_slot

BUSY = ConcurrencySlotAcquisitionError("Unable to acquire concurrency slots on ['tag:gpu']: 503 Service Unavailable")


RESTART_SECONDS = 180.0


@pytest.fixture(autouse=True)
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits so far, in seconds, none of which takes any time."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


def answers(*outcomes: Exception | str) -> tuple[list[str], Callable[[str], str]]:
    """Its calls so far, and what is called in place of a task, with these outcomes one after the other."""
    calls: list[str] = []

    def call(label: str) -> str:
        calls.append(label)
        outcome = outcomes[len(calls) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return calls, call


def test_a_busy_server_is_asked_again() -> None:
    calls, tagged = answers(BUSY, BUSY, "merged")
    assert with_slot(tagged, "step-10") == "merged"
    assert calls == ["step-10"] * 3


def test_one_that_never_answers_is_given_up_once_it_had_the_time_to_restart(waited: list[float]) -> None:
    calls, tagged = answers(*[BUSY] * (SLOT_TRIES + 5))
    with pytest.raises(ConcurrencySlotAcquisitionError, match="tag:gpu"):
        with_slot(tagged, "step-10")
    assert len(calls) == SLOT_TRIES
    assert sum(waited) > RESTART_SECONDS


def test_a_task_that_fails_is_not_called_again() -> None:
    calls, tagged = answers(ValueError("NaN"), "merged")
    with pytest.raises(ValueError, match="NaN"):
        with_slot(tagged, "step-10")
    assert calls == ["step-10"]
