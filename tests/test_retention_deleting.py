"""Deleting steps against kills, trainers, other runs of retention and read-only disks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ckptflow.cli import main
from ckptflow.discovery.discover import discover
from ckptflow.publish import Destination
from ckptflow.retention import RetentionPolicy, RetentionRequest, plan_root, retain
from ckptflow.retention.removal import SUFFIX, carry_out
from retained import as_nobody, names_in
from retention_run import command, request

CHILD = """
import os, signal, sys
event, count, renamed = sys.argv[1], int(sys.argv[2]), False
def hook(name, args):
    global count, renamed
    renamed = renamed or (name == "os.rename" and "ckptflow-deleting" in str(args))
    if renamed and name == event:
        count -= 1
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
from ckptflow.cli import main
main(sys.argv[3:])
"""


@pytest.mark.parametrize(
    ("event", "count", "half_deleted"),
    [("os.rename", 1, False), ("shutil.rmtree", 1, True), ("os.remove", 1, True), ("os.remove", 4, True)],
)
def test_a_kill_while_deleting_leaves_nothing_that_looks_like_a_checkpoint_and_the_next_run_ends_the_work(
    base: Path, event: str, count: int, half_deleted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = base / "runs" / "sft"
    killed = subprocess.run([sys.executable, "-c", CHILD, event, str(count), *command(base)], check=False)
    assert killed.returncode == -9
    leftover = f".global_step_8{SUFFIX}"
    assert (leftover in names_in(run)) == half_deleted
    left = [9, 10, 11] if half_deleted else [8, 9, 10, 11]
    assert [(f.location.global_step, f.state) for f in discover([run])] == [(step, "complete") for step in left]
    assert main(command(base, "--json")) == 0
    outcomes = [each["outcome"] for each in json.loads(capsys.readouterr().out)["removals"]]
    assert outcomes == (["leftover", "deleted", "deleted"] if half_deleted else ["deleted"] * 3)
    assert names_in(run) == {"global_step_11"}


def test_a_step_that_was_made_anew_beside_its_own_leftover_can_go(base: Path) -> None:
    run = base / "runs" / "sft"
    decisions = plan_root(request(base))
    shutil.copytree(run / "global_step_9", run / f".global_step_8{SUFFIX}")
    assert [removal.outcome for removal in carry_out(decisions)] == ["deleted"] * 3
    assert names_in(run) == {"global_step_11"}


def test_what_the_trainer_rotated_away_meanwhile_is_gone_and_no_error(base: Path) -> None:
    decisions = plan_root(request(base))
    shutil.rmtree(base / "runs" / "sft" / "global_step_9")
    assert [removal.outcome for removal in carry_out(decisions)] == ["deleted", "gone", "deleted"]


def test_two_runs_at_once_delete_each_step_once(base: Path) -> None:
    children = [
        subprocess.Popen([sys.executable, "-m", "ckptflow.cli", *command(base, "--json")], stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    documents = [json.loads(child.communicate()[0]) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    done = [r["path"] for d in documents for r in d["removals"] if r["outcome"] == "deleted"]
    assert sorted(done) == sorted(set(done))
    assert names_in(base / "runs" / "sft") == {"global_step_11"}


def test_a_step_that_changed_after_the_decision_stays(base: Path) -> None:
    decisions = plan_root(request(base))
    (base / "runs" / "sft" / "global_step_9" / "note.txt").write_text("the trainer is back")
    removals = {removal.location.name: removal for removal in carry_out(decisions)}
    assert removals["global_step_9"].outcome == "changed"
    assert (base / "runs" / "sft" / "global_step_9" / "actor").is_dir()


def test_a_step_that_is_opened_after_the_decision_stays(base: Path) -> None:
    decisions = plan_root(request(base))
    removals = list(carry_out(decisions, lambda path: "a reader" if path.name == "global_step_8" else None))
    assert (removals[0].outcome, removals[0].detail) == ("changed", "a reader")
    assert "global_step_8" in names_in(base / "runs" / "sft")


@pytest.mark.parametrize("locked", ["global_step_9/actor", "."])
def test_a_read_only_directory_is_told_and_nothing_of_its_step_is_touched(base: Path, locked: str) -> None:
    # Somewhere that everybody may reach.
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(base / "runs", Path(place, "runs"))
        run = Path(place, "runs", "sft")
        os.chmod(place, 0o777)
        for path in (*Path(place).rglob("*"),):
            os.chmod(path, 0o777 if path.is_dir() else 0o666)
        decisions = plan_root(
            RetentionRequest(
                root=run,
                policy=RetentionPolicy(keep_newest=1),
                destinations=(Destination(uri=f"file://{base}/models"),),
                settle_seconds=0,
            )
        )
        os.chmod(run / locked, 0o555)
        before = sorted((run / "global_step_9").rglob("*"))
        with as_nobody():
            removals = {removal.location.name: removal for removal in carry_out(decisions)}
        os.chmod(run / locked, 0o777)
        assert removals["global_step_9"].outcome == "failed"
        assert "read-only" in removals["global_step_9"].detail
        assert sorted((run / "global_step_9").rglob("*")) == before
        assert removals["global_step_8"].outcome == ("failed" if locked == "." else "deleted")


def test_retention_survives_a_trainer_that_saves_and_rotates_at_the_same_time(base: Path) -> None:
    run = base / "runs" / "sft"
    trainer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import shutil, sys, time\n"
            "run = sys.argv[1]\n"
            "for step in range(20, 60):\n"
            "    shutil.copytree(f'{run}/global_step_11', f'{run}/tmp-global_step_{step}')\n"
            "    __import__('os').rename(f'{run}/tmp-global_step_{step}', f'{run}/global_step_{step}')\n"
            "    shutil.rmtree(f'{run}/global_step_{step - 2}', ignore_errors=True)\n",
            str(run),
        ]
    )
    while trainer.poll() is None:
        _, removals = retain(request(base))
        assert not [removal for removal in removals if removal.outcome == "failed"]
        time.sleep(0.01)
    assert trainer.returncode == 0
    assert names_in(run) == {"global_step_11", "global_step_58", "global_step_59"}
