"""Retention leaves what is incomplete, named by the trainer, or in use by anybody."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ckptflow.conversion import Conversion
from ckptflow.convert import convert
from ckptflow.files.locks import exclusive
from ckptflow.formats.registry import locate
from ckptflow.request import ConvertRequest
from ckptflow_flows.settings import Machine
from ckptflow_flows.workplace import Workplace
from retained import age
from retention_run import doomed, planned, why


def test_a_half_saved_newest_step_does_not_push_out_the_last_whole_one(base: Path) -> None:
    run = base / "runs" / "sft"
    (run / "global_step_11" / "actor" / "model_world_size_2_rank_1.pt").unlink()
    age(base / "runs")
    assert doomed(base) == [8, 9]
    assert "incomplete" in why(base, 11)
    assert "the newest" in why(base, 10)


def test_a_latest_link_to_a_step_that_is_still_written_leaves_the_one_before_it(base: Path) -> None:
    run = base / "runs" / "sft"
    with open(run / "global_step_11" / "actor" / "model_world_size_2_rank_0.pt", "r+b") as file:
        file.truncate(1000)
    (run / "latest").symlink_to("global_step_11")
    assert doomed(base) == [8, 9]


def test_what_a_tracker_names_stays(base: Path) -> None:
    run = base / "runs" / "sft"
    (run / "latest_checkpointed_iteration.txt").write_text("9")
    assert doomed(base) == [8, 10]
    assert "latest_checkpointed_iteration.txt names it" in why(base, 9)
    (run / "latest").write_text("global_step_8")
    assert doomed(base) == [10]
    (run / "best").symlink_to("global_step_10/actor")
    assert doomed(base) == []


def test_a_step_that_changed_a_moment_ago_stays_even_if_only_beside_the_weights(base: Path) -> None:
    (base / "runs" / "sft" / "global_step_8" / "data.pt").write_bytes(b"dataloader")
    assert doomed(base) == [9, 10]
    assert "settle time" in why(base, 8)


def test_a_step_with_an_open_file_stays(base: Path) -> None:
    name = base / "runs" / "sft" / "global_step_9" / "actor" / "model_world_size_2_rank_0.pt"
    with open(name, "rb") as file:
        reader = subprocess.Popen(["sleep", "60"], stdin=file)
    try:
        assert doomed(base) == [8, 10]
        assert f"process {reader.pid} has" in why(base, 9)
    finally:
        reader.kill()
        reader.wait()
    assert doomed(base) == [8, 9, 10]


def test_a_step_on_which_a_flow_works_stays(base: Path) -> None:
    with exclusive(base / "runs" / "sft" / ".ckptflow" / ".sft-step-9.lock"):
        assert doomed(base) == [8, 10]
        assert "a run of ckptflow holds" in why(base, 9)
    assert doomed(base) == [8, 9, 10]


def test_a_flow_is_seen_at_work_on_a_run_whose_name_has_spaces(base: Path) -> None:
    run = base / "runs" / "my sft"
    (base / "runs" / "sft").rename(run)
    place = Workplace.of(Machine(), locate(run / "global_step_9"))
    with exclusive(place.lock):
        assert "a run of ckptflow holds" in str(planned(base)[9].facts.in_use)
    assert planned(base)[9].facts.in_use is None


def test_a_step_from_which_a_conversion_reads_stays_wherever_it_writes(base: Path, tmp_path: Path) -> None:
    plan_seen: list[list[int]] = []
    request = ConvertRequest(path=base / "runs" / "sft" / "global_step_9" / "actor", out=tmp_path / "elsewhere" / "out")

    def look(_: Conversion) -> None:
        plan_seen.append(doomed(base))
        assert "a run of ckptflow reads it" in why(base, 9)

    convert(request, look)
    assert plan_seen == [[8, 10]]
    assert doomed(base) == [8, 9, 10]


def test_no_step_goes_while_a_conversion_writes_into_the_run(base: Path) -> None:
    with exclusive(base / "runs" / "sft" / ".merged.ckptflow" / "lock"):
        assert doomed(base) == []
