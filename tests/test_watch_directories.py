"""The watcher gives each checkpoint once when it is complete, whatever happens to the directories meanwhile."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptflow.discovery import changes, watching
from ckptflow.discovery.changes import file_system_of, is_networked
from ckptflow.discovery.watching import ReadyCheckpoint, Watcher, watch
from retained import seen_by_nobody
from trainer_steps import OLD, hf_step, make_old

SETTLE_SECONDS = 0.5


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watcher(tmp_path: Path, clock: Clock) -> Watcher:
    return Watcher([tmp_path], settle_seconds=30, clock=clock)


def steps(ready: list[ReadyCheckpoint]) -> list[int | None]:
    return [each.location.global_step for each in ready]


def test_a_complete_step_is_given_once(tmp_path: Path, watcher: Watcher) -> None:
    hf_step(tmp_path / "run" / "checkpoint-10")
    assert steps(watcher.look_everywhere()) == [10]
    assert watcher.look_everywhere() == []
    assert watcher.look_at([tmp_path / "run" / "checkpoint-10" / "config.json"]) == []


def test_a_model_that_is_published_below_a_root_is_not_given(tmp_path: Path, watcher: Watcher, clock: Clock) -> None:
    model = hf_step(tmp_path / "models" / "step-10")
    (model / "ckptflow.json").write_text("{}")
    assert watcher.look_everywhere() == []
    assert watcher.look_at([model / "ckptflow.json"]) == []
    make_old(model, 60)
    assert steps(Watcher([model], settle_seconds=30, clock=clock).look_everywhere()) == [10]


def test_steps_come_in_order_with_their_bytes(tmp_path: Path, watcher: Watcher) -> None:
    for step in (100, 20, 3):
        hf_step(tmp_path / "run" / f"checkpoint-{step}")
    ready = watcher.look_everywhere()
    assert steps(ready) == [3, 20, 100]
    files = (tmp_path / "run" / "checkpoint-3").iterdir()
    assert ready[0].nbytes == sum(path.stat().st_size for path in files)


def test_a_step_that_changed_just_now_is_given_when_it_has_settled(
    tmp_path: Path, watcher: Watcher, clock: Clock
) -> None:
    hf_step(tmp_path / "run" / "checkpoint-10", age_seconds=0)
    assert watcher.look_everywhere() == []
    clock.now += 20
    assert watcher.look_at([]) == []
    clock.now += 11
    assert steps(watcher.look_at([])) == [10]


def test_a_file_server_whose_clock_is_ahead_delays_nothing_for_ever(
    tmp_path: Path, watcher: Watcher, clock: Clock
) -> None:
    hf_step(tmp_path / "run" / "checkpoint-10", age_seconds=-3600)
    assert watcher.look_everywhere() == []
    clock.now += 31
    assert steps(watcher.look_at([])) == [10]


def test_a_step_is_given_when_its_last_file_is_there(tmp_path: Path, watcher: Watcher, clock: Clock) -> None:
    step = hf_step(tmp_path / "run" / "checkpoint-10", age_seconds=1000, missing=1)
    assert watcher.look_everywhere() == []
    late = step / "model-00002-of-00002.safetensors"
    save_file({"layers.1.weight": np.ones((4, 4), np.float32)}, late)
    assert watcher.look_at([late]) == []
    clock.now += 31
    assert steps(watcher.look_at([])) == [10]


def test_a_file_that_was_missed_is_found_by_the_next_look_at_everything(tmp_path: Path, watcher: Watcher) -> None:
    step = hf_step(tmp_path / "run" / "checkpoint-10", missing=1)
    assert watcher.look_everywhere() == []
    save_file({"layers.1.weight": np.ones((4, 4), np.float32)}, step / "model-00002-of-00002.safetensors")
    make_old(step, OLD)
    assert steps(watcher.look_everywhere()) == [10]


def test_a_step_that_was_saved_anew_is_given_anew(tmp_path: Path, watcher: Watcher) -> None:
    step = hf_step(tmp_path / "run" / "checkpoint-10")
    watcher.look_everywhere()
    save_file({"layers.1.weight": np.zeros((4, 4), np.float32)}, step / "model-00002-of-00002.safetensors")
    make_old(step, OLD / 2)
    assert steps(watcher.look_everywhere()) == [10]


def test_a_directory_that_gets_its_final_name_is_given_then(tmp_path: Path, watcher: Watcher) -> None:
    hf_step(tmp_path / "run" / "tmp-checkpoint-10")
    assert watcher.look_everywhere() == []
    final = (tmp_path / "run" / "tmp-checkpoint-10").rename(tmp_path / "run" / "checkpoint-10")
    assert steps(watcher.look_at([final])) == [10]


def test_hints_about_names_in_the_making_are_not_followed(tmp_path: Path, watcher: Watcher) -> None:
    step = hf_step(tmp_path / "run" / ".ckptflow" / "checkpoint-10")
    assert watcher.look_at([step / "config.json", step]) == []


def test_deleted_steps_and_roots_are_no_trouble(tmp_path: Path, clock: Clock) -> None:
    root = tmp_path / "root"
    watcher = Watcher([root], settle_seconds=30, clock=clock)
    assert watcher.look_everywhere() == []
    step = hf_step(root / "run" / "checkpoint-10", age_seconds=0)
    hf_step(root / "run" / "checkpoint-20")
    assert steps(watcher.look_everywhere()) == [20]
    shutil.rmtree(step)
    clock.now += 31
    assert watcher.look_at([step]) == []
    shutil.rmtree(root)
    assert watcher.look_everywhere() == watcher.look_at([step]) == []
    hf_step(root / "run" / "checkpoint-20")
    assert steps(watcher.look_everywhere()) == [20]


def test_a_step_directory_itself_can_be_watched(tmp_path: Path) -> None:
    step = hf_step(tmp_path / "run" / "checkpoint-10")
    watcher = Watcher([step], settle_seconds=0)
    assert steps(watcher.look_everywhere()) == [10]
    assert watcher.look_at([step / "config.json"]) == []


def test_two_thousand_unchanged_steps_are_listed_and_not_parsed_again(
    tmp_path: Path, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hf_step(tmp_path / "run" / "checkpoint-1")
    for step in range(2, 2001):
        shutil.copytree(first, first.with_name(f"checkpoint-{step}"))
    assert len(watcher.look_everywhere()) == 2000
    looked_into: list[Path] = []
    find_at, judge = watcher._find_at, watching.judge
    monkeypatch.setattr(watcher, "_find_at", lambda path: looked_into.append(path) or find_at(path))
    monkeypatch.setattr(watching, "judge", lambda at, *rest: looked_into.append(at.path) or judge(at, *rest))
    started = time.monotonic()
    assert watcher.look_everywhere() == []
    assert looked_into == []
    assert time.monotonic() - started < 2.0  # 0.1 s on an idle machine
    new = shutil.copytree(first, first.with_name("checkpoint-3000"))
    assert steps(watcher.look_at([new / "config.json"])) == [3000]
    assert set(looked_into) == {tmp_path, tmp_path / "run", new}


class Following:
    """``watch`` in a thread, as a process runs it, and what it gave so far."""

    def __init__(self, root: Path, **options: float | bool) -> None:
        self.given: list[int | None] = []
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._batches = watch([root], settle_seconds=SETTLE_SECONDS, tick_seconds=0.05, **options)
        next(self._batches)  # the first look
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        for batch in self._batches:
            self.given += steps(batch)
            if self._stop.is_set():
                return

    def end(self) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def wait_for(self, *wanted: int) -> None:
        self.wait_until(lambda: set(wanted) <= set(self.given), f"{wanted} among {self.given}")

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < deadline, what
            assert self._thread.is_alive(), "the watcher ended"
            time.sleep(0.02)


@pytest.fixture(params=["inotify", "polling"])
def following(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Following]:
    """With inotify nothing else may find a step: the next look at everything is an hour away."""
    is_polling = request.param == "polling"
    poll_seconds = 0.2 if is_polling else 3600.0
    followed = Following(tmp_path, polling=is_polling, poll_seconds=poll_seconds, rescan_seconds=3600.0)
    yield followed
    followed.end()


def test_a_step_that_is_moved_in_is_given_within_seconds(tmp_path: Path, following: Following) -> None:
    aside = hf_step(tmp_path.with_name(tmp_path.name + "-aside") / "checkpoint-10")
    (tmp_path / "run").mkdir()
    aside.rename(tmp_path / "run" / "checkpoint-10")
    following.wait_for(10)
    shutil.rmtree(aside.parent)


def test_a_whole_run_that_is_moved_in_is_given_too(tmp_path: Path, following: Following) -> None:
    aside = hf_step(tmp_path.with_name(tmp_path.name + "-aside") / "run" / "checkpoint-10").parent
    aside.rename(tmp_path / "run")
    following.wait_for(10)
    shutil.rmtree(aside.parent)


def test_a_growing_step_is_given_once_and_not_before_it_is_whole(tmp_path: Path, following: Following) -> None:
    step = hf_step(tmp_path / "run" / "checkpoint-10", age_seconds=0, shards=4, missing=3)
    for number in range(1, 4):
        time.sleep(SETTLE_SECONDS / 2)
        assert following.given == []
        name = f"model-{number + 1:05d}-of-00004.safetensors"
        save_file({f"layers.{number}.weight": np.ones((4, 4), np.float32)}, step / name)
    following.wait_for(10)
    time.sleep(3 * SETTLE_SECONDS)
    assert following.given == [10]


def test_twenty_steps_at_once_are_each_given_once(tmp_path: Path, following: Following) -> None:
    first = hf_step(tmp_path.with_name(tmp_path.name + "-aside") / "checkpoint-1")
    for step in range(2, 21):
        shutil.copytree(first, tmp_path / "run" / f"checkpoint-{step}")
    following.wait_for(*range(2, 21))
    time.sleep(3 * SETTLE_SECONDS)
    assert sorted(following.given) == list(range(2, 21))
    shutil.rmtree(first.parent)


def test_a_root_that_is_deleted_and_made_again_is_watched_again(tmp_path: Path, following: Following) -> None:
    hf_step(tmp_path / "run" / "checkpoint-10")
    following.wait_for(10)
    shutil.rmtree(tmp_path)
    time.sleep(0.5)
    hf_step(tmp_path / "run" / "checkpoint-20")
    following.wait_for(20)
    hf_step(tmp_path / "run" / "checkpoint-30")
    following.wait_for(30)


def test_inotify_that_gives_up_is_replaced_by_polling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def too_many(self: changes.Changes, roots: list[Path], seconds: float) -> Iterator[set[tuple[int, str]]]:
        raise OSError(28, "OS file watch limit reached")
        yield set()

    monkeypatch.setattr(changes.Changes, "_open", too_many)
    followed = Following(tmp_path, poll_seconds=0.2, rescan_seconds=3600.0)
    hf_step(tmp_path / "run" / "checkpoint-10")
    followed.wait_for(10)
    followed.end()
    assert "OS file watch limit reached" in caplog.text


def test_a_local_file_system_is_watched_and_a_network_one_polled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert file_system_of(tmp_path) != ""
    assert not is_networked(tmp_path)
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    line = f"36 35 {os.major(device)}:{os.minor(device)} / /mnt rw,noatime master:1 - {{}} server:/export rw\n"
    monkeypatch.setattr(changes, "MOUNTS", mounts)
    for kind, expected in {"ext4": False, "nfs4": True, "lustre": True, "gpfs": True, "fuse.sshfs": True}.items():
        mounts.write_text("22 1 0:0 / /proc rw - proc proc rw\n" + line.format(kind))
        assert (file_system_of(tmp_path), is_networked(tmp_path)) == (kind, expected)


def test_a_directory_that_can_not_be_read_is_told_once_and_stops_nothing(
    tmp_path: Path, watcher: Watcher, caplog: pytest.LogCaptureFixture
) -> None:
    hf_step(tmp_path / "run" / "checkpoint-10")
    private = hf_step(tmp_path / "run" / "checkpoint-20")
    private.chmod(0)
    with seen_by_nobody(tmp_path):
        assert steps(watcher.look_everywhere()) == [10]
        assert watcher.look_everywhere() == watcher.look_at([private / "config.json"]) == []
    assert [record.args for record in caplog.records] == [(str(private), "Permission denied")]
    private.chmod(0o755)
    assert steps(watcher.look_everywhere()) == [20]
