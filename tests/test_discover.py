"""detect tells complete, incomplete and in-progress apart while files grow, are renamed, or vanish."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from ckptflow.cli import main
from ckptflow.discovery.destinations import destination_of
from ckptflow.discovery.discover import by_step, discover
from ckptflow.discovery.watching import Watcher
from ckptflow.errors import AmbiguousCheckpointError, NotACheckpointError
from ckptflow.formats.registry import check, locate
from ckptflow.formats.step_names import global_step_of
from ckptflow.publish.settings import PublishSettings
from ckptflow.publish.targets import open_target
from retained import seen_by_nobody
from trainer_steps import OLD, hf_step, make_old


def states(root: Path, **options: float) -> dict[int | None, str]:
    return {f.location.global_step: f.state for f in discover([root], **options)}


def test_a_whole_step_is_complete_and_one_with_a_missing_shard_is_not(tmp_path: Path) -> None:
    hf_step(tmp_path / "run" / "checkpoint-10")
    hf_step(tmp_path / "run" / "checkpoint-20", missing=1)
    found = {f.location.global_step: f for f in discover([tmp_path])}
    assert (found[10].state, found[20].state) == ("complete", "incomplete")
    assert "model-00002-of-00002.safetensors" in found[20].reason


def test_a_model_that_was_made_of_a_checkpoint_is_none_unless_it_is_named(tmp_path: Path) -> None:
    hf_step(tmp_path / "run" / "checkpoint-10")
    model = hf_step(tmp_path / "models" / "run" / "step-10")
    (model / "ckptflow.json").write_text("{}")
    hf_step(model / "checkpoint-500")  # a training that began with the model and saves into its directory
    assert [f.location.path.name for f in discover([tmp_path])] == ["checkpoint-500", "checkpoint-10"]
    assert [f.location.path for f in discover([model])] == [model]
    assert locate(tmp_path / "run").path.name == "checkpoint-10"
    assert locate(model).path == model


def test_numbers_sort_as_numbers(tmp_path: Path) -> None:
    for step in (9000, 10000, 900):
        hf_step(tmp_path / f"step_{step}")
    assert [f.location.global_step for f in by_step(discover([tmp_path]))] == [900, 9000, 10000]
    assert [f.location.global_step for f in discover([tmp_path])] == [900, 9000, 10000]


def test_a_step_that_changed_a_moment_ago_is_in_progress_until_the_settle_time_is_over(tmp_path: Path) -> None:
    hf_step(tmp_path / "checkpoint-10", age_seconds=5)
    assert states(tmp_path, settle_seconds=30) == {10: "in-progress"}
    assert states(tmp_path, settle_seconds=1) == {10: "complete"}
    assert states(tmp_path, settle_seconds=30, now=time.time() + 60) == {10: "complete"}


def test_a_step_directory_of_another_script_needs_no_trainer_state_once_it_is_old(tmp_path: Path) -> None:
    step = hf_step(tmp_path / "checkpoint-10")
    (step / "trainer_state.json").unlink()
    make_old(step, OLD)
    assert states(tmp_path) == {10: "complete"}
    make_old(step, 100)
    assert states(tmp_path) == {10: "in-progress"}
    (step / "optimizer.pt").write_bytes(b"half")
    make_old(step, OLD)
    assert states(tmp_path) == {10: "in-progress"}, "the Trainer was at work here and did not end"


def test_staging_names_are_ignored(tmp_path: Path) -> None:
    hf_step(tmp_path / "checkpoint-5")
    hf_step(tmp_path / "tmp-checkpoint-10")
    hf_step(tmp_path / "checkpoint-15.tmp")
    hf_step(tmp_path / ".ckptflow" / "checkpoint-20")
    assert states(tmp_path) == {5: "complete"}


def test_steps_that_are_renamed_and_deleted_meanwhile_do_no_harm(tmp_path: Path) -> None:
    for step in range(10):
        hf_step(tmp_path / f"checkpoint-{step}")
    stop = threading.Event()

    def trainer() -> None:
        while not stop.is_set():
            for step in range(10):
                staging = tmp_path / f"tmp-checkpoint-{step}"
                (tmp_path / f"checkpoint-{step}").rename(staging)
                (staging / "config.json").unlink()
                (staging / "config.json").write_text("{}")
                staging.rename(tmp_path / f"checkpoint-{step}")

    thread = threading.Thread(target=trainer)
    thread.start()
    try:
        for _ in range(30):
            assert all(state != "published" for state in states(tmp_path).values())
    finally:
        stop.set()
        thread.join()


def test_a_growing_file_becomes_complete_only_when_it_is_whole(tmp_path: Path) -> None:
    step = hf_step(tmp_path / "checkpoint-10")
    shard = step / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    for size in range(0, len(whole), 7):
        shard.write_bytes(whole[:size])
        make_old(step, OLD)
        assert states(tmp_path) != {10: "complete"}, size
    shard.write_bytes(whole)
    make_old(step, OLD)
    assert states(tmp_path) == {10: "complete"}


def test_a_run_with_several_steps_is_ambiguous_and_the_choices_are_listed(tmp_path: Path) -> None:
    hf_step(tmp_path / "run" / "checkpoint-9")
    hf_step(tmp_path / "run" / "checkpoint-10")
    with pytest.raises(AmbiguousCheckpointError) as error:
        locate(tmp_path / "run")
    assert "checkpoint-9" in str(error.value)
    assert "checkpoint-10" in str(error.value)
    assert locate(tmp_path / "run" / "checkpoint-9").global_step == 9


def test_a_config_without_weights_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(NotACheckpointError, match="no known checkpoint"):
        locate(tmp_path)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("global_step_10", 10),
        ("global_step3", 3),
        ("checkpoint-500", 500),
        ("step-5", 5),
        ("iter_0000010", 10),
        ("epoch=1-step=20187.ckpt", 20187),
        ("epoch0epochstep9globalstep9", 9),
        ("hf-10", 10),
        ("llama-hf-7b", None),
        ("step_7/policy/weights/iter_0000000", 7),
        ("checkpoint-0", 0),
        ("footstep_photos", None),
    ],
)
def test_step_numbers_are_read_from_the_names_that_trainers_give(name: str, step: int | None) -> None:
    assert global_step_of(Path("/data/run") / name) == step


def test_a_step_that_its_trainer_marks_as_unfinished_waits_until_the_mark_is_gone(tmp_path: Path) -> None:
    location = locate(hf_step(tmp_path / "run" / "epoch_0_step_5" / "model"))
    mark = tmp_path / "run" / "epoch_0_step_5" / ".incomplete"
    mark.touch()
    assert check(location).state == "in-progress"
    assert ".incomplete" in check(location).reason
    mark.unlink()
    assert check(location).state == "complete"


def test_steps_are_found_as_deep_as_trainers_put_them(tmp_path: Path) -> None:
    areal = hf_step(tmp_path / "checkpoints/user/experiment/trial/default/epoch0epochstep5globalstep5")
    nemo_rl = hf_step(tmp_path / "results/project/experiment/step_5/policy/weights/model")
    assert {found.location.path for found in discover([tmp_path])} == {areal, nemo_rl}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("global_step_5/actor/huggingface", "my-run/step-5"),
        ("global_step_5/critic/huggingface", "my-run/step-5/critic"),
        ("step_5/policy/weights/model", "my-run/step-5"),
        ("step_5/value/weights/model", "my-run/step-5/value"),
        ("_actor/global_step5", "my-run/step-5"),
        ("_critic/global_step5", "my-run/step-5/critic"),
        ("_actor/best_global_step5", "my-run/step-5/actor-best"),
        ("global_step5_hf", "my-run/step-5/hf"),
        ("hf-5", "my-run/step-5/hf"),
        ("checkpoint-5-merged", "my-run/step-5/merged"),
        ("lightning_logs/version_3/checkpoints/step=5", "my-run-version_3/step-5"),
        ("checkpoints/step_5/trainer", "my-run/step-5"),
        ("weights/step_5", "my-run/step-5/weights"),
        ("step_5/ema", "my-run/step-5/ema"),
        ("step_5/model_ema", "my-run/step-5/ema"),
        ("checkpoint-5/pytorch_model_fsdp_0", "my-run/step-5"),
        ("checkpoint-5/pytorch_model_fsdp_1", "my-run/step-5/model-1"),
        ("default/epoch0epochstep5globalstep5", "my-run/step-5"),
        ("checkpoint-5/global_step5", "my-run/step-5"),
        ("checkpoint-5/iter_0000005", "my-run/step-5"),
        ("checkpoint-4/global_step5", "checkpoint-4/step-5"),
    ],
)
def test_no_two_models_of_a_step_have_one_destination(tmp_path: Path, name: str, place: str) -> None:
    location = locate(hf_step(tmp_path / "my-run" / name))
    assert location.global_step == 5
    assert destination_of(location, "s3://bucket") == f"s3://bucket/{place}"


def test_a_run_that_is_called_like_a_role_keeps_a_name(tmp_path: Path) -> None:
    location = locate(hf_step(tmp_path / "critic" / "checkpoint-5"))
    assert destination_of(location, "s3://bucket").endswith("/step-5/critic")


def test_a_checkpoint_always_has_the_same_destination(tmp_path: Path) -> None:
    location = locate(hf_step(tmp_path / "my-run" / "checkpoint-10"))
    assert destination_of(location, "s3://bucket/models/") == "s3://bucket/models/my-run/step-10"
    assert destination_of(location, "s3://b/{run}-{step}") == "s3://b/my-run-step-10"


@pytest.mark.parametrize("name", ["lr=1e-4#2", "is it?", "100%25", "a%41", "two\nlines", "späte läufe"])
def test_a_run_is_published_under_its_own_name_whatever_that_is(tmp_path: Path, name: str) -> None:
    location = locate(hf_step(tmp_path / name / "checkpoint-10"))
    models = tmp_path / "models"
    target = open_target(destination_of(location, models.as_uri()), PublishSettings())
    assert target.put_bytes("config.json", b"{}")
    target.close()
    assert (models / name / "step-10" / "config.json").read_bytes() == b"{}"


def test_a_link_to_a_run_elsewhere_is_told_and_those_of_trainers_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scratch = hf_step(tmp_path / "scratch" / "far" / "checkpoint-10").parent
    near = hf_step(tmp_path / "runs" / "near" / "checkpoint-20").parent
    (near / "latest").symlink_to("checkpoint-20")
    (near / "nowhere").symlink_to("checkpoint-30")
    (near / "base").symlink_to(tmp_path / "scratch")  # no step of its own
    (tmp_path / "runs" / "far").symlink_to(scratch)
    assert list(states(tmp_path / "runs")) == [20]
    Watcher([tmp_path / "runs"], settle_seconds=0).look_everywhere()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/runs/far: a link to {scratch}, which is not looked at: name that as a root too"
    ]
    assert list(states(tmp_path / "runs" / "far")) == [10]


def test_times_from_the_future_say_nothing_and_when_the_files_came_here_does(tmp_path: Path) -> None:
    step = hf_step(tmp_path / "run" / "checkpoint-10", age_seconds=-3600)  # the trainer's clock is an hour ahead
    assert [found.state for found in discover([step], settle_seconds=0)] == ["complete"]
    (found,) = discover([step], settle_seconds=30)
    assert (found.state, found.reason[:34]) == ("in-progress", "complete, but changed 0 s ago; set")
    (found,) = discover([step], settle_seconds=30, now=time.time() + 40)
    assert found.state == "complete"
    assert found.newest_mtime < time.time() + 1


def test_where_the_file_server_s_clock_is_ahead_too_that_is_told(tmp_path: Path) -> None:
    hf_step(tmp_path / "run" / "checkpoint-10", age_seconds=-3600)
    (found,) = discover([tmp_path], settle_seconds=30, now=time.time() - 600)
    assert found.state == "in-progress"
    assert "ahead of this machine's clock: set the clocks" in found.reason


def test_the_command_prints_one_json_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf_step(tmp_path / "checkpoint-10")
    assert main(["detect", str(tmp_path), "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [(e["global_step"], e["state"], e["layout"]) for e in entries] == [(10, "complete", "huggingface")]


def test_a_missing_root_is_an_error_and_wrong_usage_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["detect", str(tmp_path / "nothing")]) == 1
    assert "no such file" in capsys.readouterr().err
    with pytest.raises(SystemExit) as error:
        main(["convert"])
    assert error.value.code == 2


def test_thousands_of_steps_are_all_listed(tmp_path: Path) -> None:
    first = hf_step(tmp_path / "checkpoint-0")
    for step in range(1, 500):
        copy = tmp_path / f"checkpoint-{step}"
        copy.mkdir()
        for path in first.iterdir():
            os.link(path, copy / path.name)
    make_old(tmp_path, OLD)
    assert len(states(tmp_path)) == 500


@pytest.mark.parametrize("name", ["²", "run-²³", "١", "⑦"])
def test_a_digit_that_is_no_decimal_is_a_letter(tmp_path: Path, name: str) -> None:
    hf_step(tmp_path / name / "checkpoint-10")
    hf_step(tmp_path / "run-1" / "checkpoint-20")
    assert states(tmp_path) == {10: "complete", 20: "complete"}


def test_a_directory_of_somebody_else_hides_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hf_step(tmp_path / "run" / "checkpoint-10")
    private = [tmp_path / "lost+found", tmp_path / "run" / "checkpoint-20"]
    for path in private:
        path.mkdir()
        path.chmod(0)
    with seen_by_nobody(tmp_path):
        assert states(tmp_path) == {10: "complete"}
        assert {record.args[0] for record in caplog.records if isinstance(record.args, tuple)} == set(private)
        assert locate(tmp_path).path == tmp_path / "run" / "checkpoint-10"
        with pytest.raises(PermissionError):
            states(private[0])
