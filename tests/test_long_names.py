"""Names as long as a file system takes them: what is made beside them has shorter ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptflow.cli import main
from ckptflow.discovery.destinations import work_lock, work_path
from ckptflow.files.hidden import NAME_MAX_BYTES, fitted, hidden_beside
from ckptflow.files.locks import exclusive
from ckptflow.formats.registry import locate
from ckptflow.retention import plan_root
from ckptflow.retention.removal import carry_out
from retained import names_in
from retention_run import request
from trainer_steps import hf_step

LONG = "a" * NAME_MAX_BYTES


def test_a_model_can_be_made_under_the_longest_name(tmp_path: Path) -> None:
    step = hf_step(tmp_path / "run" / "checkpoint-10")
    assert main(["convert", str(step), str(tmp_path / LONG)]) == 0
    assert sorted(os.listdir(tmp_path)) == [LONG, "run"]


@pytest.mark.parametrize("name", [LONG, "ä" * 127, "a" * 240])
def test_the_work_of_a_run_with_a_long_name_has_a_place_and_a_lock_of_its_own(tmp_path: Path, name: str) -> None:
    steps = [locate(hf_step(tmp_path / name / f"checkpoint-{n}")) for n in (10, 11)]
    places = [work_path(step) for step in steps]
    assert len(set(places)) == len(set(map(work_lock, places))) == 2
    for place in places:
        with exclusive(work_lock(place)):
            place.mkdir()
    assert work_path(steps[0]) == places[0]


def test_a_step_with_a_long_name_can_be_deleted_by_retention(base: Path) -> None:
    run = base / "runs" / "sft"
    long_named = run / f"{'a' * 241}_global_step_8"
    (run / "global_step_8").rename(long_named)
    assert long_named in {removal.location for removal in carry_out(plan_root(request(base)))}
    assert names_in(run) == {"global_step_11"}


def test_names_that_fit_stay_and_those_that_do_not_are_told_apart() -> None:
    assert fitted(LONG) == LONG
    assert hidden_beside(Path("/d/name"), ".lock") == Path("/d/.name.lock")
    longer = [fitted(f"{LONG}{end}") for end in ("", "b", "c")]
    assert len(set(longer)) == 3
    assert all(len(os.fsencode(name)) <= NAME_MAX_BYTES for name in longer)
    assert len(os.fsencode(fitted("ä" * 200, 100))) <= 100
