"""What watch does with complete checkpoints: in the order of the policy, once, and again when it is time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ckptflow.discovery.watching import ReadyCheckpoint, Watcher
from ckptflow.errors import PermanentPublishError, TransientPublishError, UsageError
from ckptflow.files.locks import exclusive
from ckptflow.formats.base import Location
from ckptflow_flows.decisions import Ended, LastRun, Making, Patience
from ckptflow_flows.desk import Desk
from ckptflow_flows.settings import Destination
from ckptflow_flows.starting import ASK_THREADS, Outcome, Policy, Starter
from trainer_steps import hf_step


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 2_000_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class KeptRuns:
    """Runs that end when and as a test says."""

    clock: Clock
    last: dict[Location, LastRun] = field(default_factory=dict)
    started: list[tuple[int | None, int]] = field(default_factory=list)
    asked: list[int | None] = field(default_factory=list)
    unstored: set[int] = field(default_factory=set)
    is_away: bool = False
    is_late: bool = False

    def last_runs(self, locations: Sequence[Location], making: Making) -> Mapping[Location, LastRun]:
        if self.is_away:
            raise ConnectionError("nobody answers")
        return {location: self.last[location] for location in locations if location in self.last}

    def waiting(self) -> int:
        return sum(run.ended == "active" for run in self.last.values())

    def start(self, checkpoint: ReadyCheckpoint, making: Making, attempt: int) -> str:
        self.started.append((checkpoint.location.global_step, attempt))
        self._set(checkpoint.location, attempt, "active")
        return "a-name"

    def declare_lost(self, location: Location, making: Making, attempt: int) -> bool:
        assert self.last[location].ended == "pending"
        if not self.is_late:
            self._set(location, attempt, "crashed")
        return not self.is_late

    def make_sure_announced(self, checkpoints: Sequence[ReadyCheckpoint], making: Making) -> set[Location]:
        self.asked += [checkpoint.location.global_step for checkpoint in checkpoints]
        return {each.location for each in checkpoints if each.location.global_step not in self.unstored}

    def end(self, ended: Ended, step: int | None = None) -> None:
        """All runs end so, or the one of a step."""
        for location, run in self.last.items():
            if run.ended in ("active", "pending") and step in (None, location.global_step):
                self._set(location, run.attempt, ended)

    def _set(self, location: Location, attempt: int, ended: Ended) -> None:
        now = self.clock.now
        self.last[location] = LastRun(attempt=attempt, ended=ended, started_at=now, since=now, message="a reason")


@dataclass
class Office:
    """A desk, the runs behind it, and all that it said."""

    desk: Desk
    runs: KeptRuns
    clock: Clock
    said: list[Outcome]
    root: Path

    def drop(self, *steps: int) -> None:
        for step in steps:
            hf_step(self.root / "run" / f"checkpoint-{step}")
        self.desk.take(Watcher([self.root], settle_seconds=0).look_everywhere())

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.desk.turn()


@pytest.fixture
def office(tmp_path: Path) -> Callable[..., Office]:
    def opened(policy: Policy = "newest-first", max_waiting: int = 20) -> Office:
        clock = Clock()
        runs = KeptRuns(clock=clock)
        making = Making(destinations=(Destination(uri=f"file://{tmp_path}/models"),))
        patience = Patience(pending_seconds=60, retry_seconds=100)

        @contextmanager
        def connect() -> Iterator[KeptRuns]:
            if runs.is_away:
                raise ConnectionError("nobody answers")
            yield runs

        starter = Starter(making=making, policy=policy, patience=patience, max_waiting=max_waiting, clock=clock)
        said: list[Outcome] = []
        desk = Desk(starter=starter, connect=connect, report=said.append, away=(ConnectionError,))
        return Office(desk=desk, runs=runs, clock=clock, said=said, root=tmp_path / "runs")

    return opened


@pytest.mark.parametrize(("policy", "order"), [("newest-first", [100, 20, 3]), ("in-order", [3, 20, 100])])
def test_runs_are_started_in_the_order_of_the_policy(
    office: Callable[..., Office], policy: Policy, order: list[int]
) -> None:
    at = office(policy)
    at.drop(20, 100, 3)
    at.desk.turn()
    assert [step for step, _ in at.runs.started] == order


def test_a_run_is_started_once_however_often_its_checkpoint_is_seen(office: Callable[..., Office]) -> None:
    at = office()
    at.drop(10)
    for _ in range(5):
        at.drop()
        at.pass_time(20)
    assert at.runs.started == [(10, 1)]


def test_a_newer_checkpoint_overtakes_those_that_wait_for_room(office: Callable[..., Office]) -> None:
    at = office(max_waiting=2)
    at.drop(1, 2, 3, 4)
    at.desk.turn()
    assert at.runs.started == [(4, 1), (3, 1)]
    at.drop(5)
    at.pass_time(3)
    assert len(at.runs.started) == 2
    at.runs.end("completed", step=4)
    at.pass_time(3)
    assert at.runs.started[2:] == [(5, 1)]


def test_nothing_is_lost_while_the_server_is_away(office: Callable[..., Office]) -> None:
    at = office()
    at.runs.is_away = True
    at.desk.check_set_up()
    at.drop(10)
    at.pass_time(2)
    at.drop(20)
    for _ in range(100):
        at.pass_time(0.5)
    at.runs.is_away = False
    assert at.runs.started == []
    at.pass_time(61)
    assert at.runs.started == [(20, 1), (10, 1)]


def test_a_site_that_is_not_set_up_is_an_error_at_once(office: Callable[..., Office]) -> None:
    at = office()

    @contextmanager
    def connect() -> Iterator[KeptRuns]:
        raise UsageError("no such deployment")
        yield at.runs

    at.desk.connect = connect
    with pytest.raises(UsageError, match="no such deployment"):
        at.desk.check_set_up()


def test_a_crashed_run_is_started_again_and_a_failed_one_after_a_while(office: Callable[..., Office]) -> None:
    at = office()
    at.drop(10)
    at.desk.turn()
    at.runs.end("crashed")
    at.pass_time(20)
    assert at.runs.started == [(10, 1), (10, 2)]
    at.runs.end("failed")
    at.pass_time(20)
    at.pass_time(100)
    assert len(at.runs.started) == 2
    at.pass_time(101)
    assert at.runs.started[2:] == [(10, 3)]


def test_a_run_that_nobody_began_is_given_up_and_started_anew(office: Callable[..., Office]) -> None:
    at = office()
    at.drop(10)
    at.desk.turn()
    at.runs.end("pending")
    at.pass_time(20)
    assert at.runs.started == [(10, 1)]
    at.pass_time(61)
    assert at.runs.started == [(10, 1), (10, 2)]


def test_a_run_that_began_at_the_last_moment_is_not_given_up(office: Callable[..., Office]) -> None:
    at = office()
    at.drop(10)
    at.desk.turn()
    at.runs.end("pending")
    at.runs.is_late = True
    at.pass_time(61)
    assert at.runs.started == [(10, 1)]


def test_events_are_looked_after_until_the_server_has_stored_them(office: Callable[..., Office]) -> None:
    at = office()
    at.runs.unstored = {20}
    at.drop(10, 20)
    at.desk.turn()
    assert at.runs.asked == []
    at.pass_time(11)
    at.pass_time(11)
    assert sorted(filter(None, at.runs.asked)) == [10, 20, 20]
    at.runs.unstored = set()
    for _ in range(10):
        at.pass_time(11)
    assert sorted(filter(None, at.runs.asked)) == [10, 20, 20, 20]


def test_a_refused_checkpoint_is_left_and_told_once(office: Callable[..., Office]) -> None:
    at = office()
    at.drop(10)
    at.desk.turn()
    at.runs.end("refused")
    for _ in range(5):
        at.pass_time(1000)
    assert at.runs.started == [(10, 1)]
    assert [outcome.state for outcome in at.said] == ["started", "left"]
    assert "a reason" in at.said[-1].detail


def test_a_checkpoint_that_is_deleted_is_forgotten(office: Callable[..., Office]) -> None:
    at = office()
    at.drop(10)
    shutil.rmtree(at.root)
    at.pass_time(1)
    at.pass_time(1000)
    assert at.runs.started == []


@pytest.mark.parametrize(
    "error",
    [PermissionError(13, "out of reach"), PermanentPublishError("out of reach")],
    ids=["source", "destination"],
)
def test_a_checkpoint_that_can_not_be_judged_does_not_stop_the_others(
    office: Callable[..., Office], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    at = office()
    at.drop(10, 20)

    def no_answer_for_ten(location: Location, *rest: object) -> bool:
        if location.global_step == 10:
            raise error
        return False

    monkeypatch.setattr("ckptflow_flows.starting.is_published", no_answer_for_ten)
    at.desk.turn()
    assert at.runs.started == [(20, 1)]
    assert "out of reach" in at.said[0].detail


def test_a_destination_that_is_away_is_asked_once_a_minute_and_nothing_is_lost(
    office: Callable[..., Office], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = office()
    at.drop(*range(1, 31))
    asked = []

    def away(location: Location, *rest: object) -> bool:
        asked.append(location)
        raise TransientPublishError("nobody answers")

    monkeypatch.setattr("ckptflow_flows.starting.is_published", away)
    for _ in range(100):
        at.pass_time(0.5)
    assert len(asked) <= ASK_THREADS
    monkeypatch.undo()
    at.pass_time(60)
    assert len(at.runs.started) == 20


def at_two_places(at: Office, tmp_path: Path) -> Making:
    """The office publishes to two directories."""
    uris = [f"file://{tmp_path}/{name}" for name in ("models", "second")]
    making = at.desk.starter.making.model_copy(update={"destinations": tuple(Destination(uri=uri) for uri in uris)})
    at.desk.starter = replace(at.desk.starter, making=making)
    return making


@pytest.mark.parametrize(
    ("first", "second", "state"),
    [
        (True, True, "published"),
        (True, False, "started"),
        (TransientPublishError("away"), False, "started"),
        (False, TransientPublishError("away"), "started"),
        (True, TransientPublishError("away"), "waiting"),
    ],
)
def test_published_is_what_is_at_all_destinations(
    office: Callable[..., Office],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    first: bool | Exception,
    second: bool | Exception,
    state: str,
) -> None:
    at = office()
    at_two_places(at, tmp_path)
    at.drop(10)

    def look(location: Location, uri: str, *rest: object) -> bool:
        answer = first if uri.endswith("models") else second
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("ckptflow_flows.starting.is_published", look)
    at.desk.turn()
    assert [outcome.state for outcome in at.said] == [state]


def test_a_run_that_died_after_the_last_upload_is_made_up_for_once_nobody_holds_its_lock(
    office: Callable[..., Office], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = office()
    monkeypatch.setattr("ckptflow_flows.starting.is_published", lambda *arguments: True)
    lock = at.root / "run" / ".ckptflow" / ".run-step-10.lock"
    with exclusive(lock):
        at.drop(10, 20)
        at.desk.turn()
        assert {outcome.state for outcome in at.said} == {"published"}
    at.drop(30)  # and all are looked at again
    at.desk.turn()
    assert at.runs.started == [(10, 1)]


def test_two_runs_of_one_name_are_not_both_at_work_on_one_destination(office: Callable[..., Office]) -> None:
    it = office()
    first, second = (hf_step(it.root / team / "exp1" / "checkpoint-10") for team in ("teamA", "teamB"))
    other = hf_step(it.root / "teamB" / "exp2" / "checkpoint-20")
    look = Watcher([it.root], settle_seconds=0)
    it.desk.take([each for each in look.look_everywhere() if each.location.path == first])
    it.pass_time(0)
    it.pass_time(1)  # the first is not due again
    it.desk.take(
        [each for each in Watcher([it.root], settle_seconds=0).look_everywhere() if each.location.path != first]
    )
    it.pass_time(0)
    started = [location.path for location in it.runs.last]
    assert started == [first, other], "hours of work would end in a refusal"
    said = {outcome.checkpoint.location.path: outcome for outcome in it.said}
    assert said[second].state == "waiting"
    assert f"{first} is on its way to the same place" in said[second].detail
    assert "models/exp1/step-10" in said[second].detail
    it.runs.end("completed")
    it.pass_time(100)
    assert second in [location.path for location in it.runs.last], "its run says whether the place is taken"


def test_of_two_models_of_one_place_in_one_look_one_is_started(office: Callable[..., Office]) -> None:
    it = office()
    for name in ("alice", "bob"):
        hf_step(it.root / "run" / "global_step_10" / name)
    it.desk.take(Watcher([it.root], settle_seconds=0).look_everywhere())
    it.pass_time(0)
    assert len(it.runs.started) == 1
    assert sorted(outcome.state for outcome in it.said) == ["started", "waiting"]
