"""What a person or a script does around the commands: odd values, odd names, closed pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints import write_fsdp_step
from ckptflow.cli import main
from ckptflow.convert import convert
from ckptflow.request import ConvertRequest
from trainer_steps import hf_step

CKPTFLOW = f"{sys.executable} -m ckptflow.cli"


def in_a_shell(command: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["bash", "-c", command], env=os.environ | variables, capture_output=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "a", "b", "--max-shard-size", "9" * 400],
        ["convert", "a", "b", "--memory-budget", "9" * 20],
        ["convert", "a", "b", "--lora-alpha", "nan"],
        ["detect", "a", "--settle", "nan"],
        ["detect", "a", "--settle", "-1"],
        ["retain", "a", "--to", "file:///models", "--settle", "inf"],
        ["watch", "a", "--to", "file:///models", "--poll-seconds", "-1"],
        ["verify", "a", "--timeout", "nan"],
        ["deploy", "a", "--to", "file:///models", "--heartbeat-seconds", "29"],
        ["deploy", "a", "--to", "file:///models", "--gpus", "-1"],
        ["deploy", "a", "--to", "file:///models", "--runs-at-once", "-1"],
    ],
)
def test_a_number_that_is_none_is_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert f"argument {arguments[-2]}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--config", "--base-model"])
@pytest.mark.parametrize("directory", ["nowhere", "empty", "file"])
def test_a_directory_that_is_named_and_holds_no_model_is_wrong_usage(
    tmp_path: Path, option: str, directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    step = write_fsdp_step(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("{}")
    named = [option, str(tmp_path / directory)]
    for arguments in (["convert", str(step), str(tmp_path / "out")], ["inspect", str(step)]):
        assert main([*arguments, *named]) == 2
        assert f"{option} names no directory of a model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_more_threads_than_anybody_has_change_nothing(tmp_path: Path) -> None:
    step = write_fsdp_step(tmp_path / "run")
    record = convert(ConvertRequest(path=step, out=tmp_path / "out", threads=10**30))
    assert record == convert(ConvertRequest(path=step, out=tmp_path / "other"))


def test_a_name_that_is_no_text_goes_through_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff"))
    write_fsdp_step(tmp_path / "run").parent.rename(run)
    step = run / "global_step_10"
    assert main(["convert", str(step), str(run / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((run / "out" / "ckptflow.json").read_bytes())
    assert main(["upload", str(run / "out"), f"file://{tmp_path}/models/run/step-10", "--json"]) == 0
    json.loads(capsys.readouterr().out)
    assert main(["detect", str(run), "--settle", "0", "--to", f"file://{tmp_path}/models/{{step}}", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["path"] == str(step / "actor")


@pytest.mark.parametrize("options", ["", "--json"])
def test_output_that_has_no_sign_for_a_letter_names_it_otherwise(tmp_path: Path, options: str) -> None:
    hf_step(tmp_path / "Läufe" / "checkpoint-10")
    ended = in_a_shell(f"{CKPTFLOW} detect '{tmp_path}' {options}", PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stderr) == (0, b"")
    if options:
        (found,) = json.loads(ended.stdout)
        assert found["path"] == str(tmp_path / "Läufe" / "checkpoint-10")
    else:
        assert b"L\\xe4ufe" in ended.stdout


def test_closed_streams_are_no_files_of_the_output(tmp_path: Path) -> None:
    step = write_fsdp_step(tmp_path / "run")
    ended = in_a_shell(f"{CKPTFLOW} convert '{step}' '{tmp_path}/out' <&- >&- 2>&-")
    assert ended.returncode == 0
    convert(ConvertRequest(path=step, out=tmp_path / "other"))
    for path in (tmp_path / "other").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert in_a_shell(f"{CKPTFLOW} detect '{tmp_path}' --json >&-").returncode == 0


def test_output_that_nothing_takes_fails_and_blames_no_file(tmp_path: Path) -> None:
    ended = in_a_shell(f"{CKPTFLOW} detect '{tmp_path}' --json > /dev/full")
    assert (ended.returncode, ended.stderr) == (1, b"ckptflow: No space left on device\n")


@pytest.mark.parametrize(
    ("command", "name", "value", "told"),
    [
        ("run", "PREFECT_LOGGING_LEVEL", "LOUD", b"level of LoggingSettings"),
        ("run", "CKPTFLOW_RETRIES", "often", b"retries of Limits"),
        ("run", "CKPTFLOW_TASK_RUNNER", "celery", b"task_runner of Workers"),
        ("watch --in-process", "CKPTFLOW_RETRIES", "often", b"retries of Limits"),
        ("deploy", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "5", b"heartbeat_frequency of FlowsSettings"),
    ],
)
def test_a_variable_that_holds_what_it_can_not_is_wrong_usage(
    tmp_path: Path, command: str, name: str, value: str, told: bytes
) -> None:
    step = hf_step(tmp_path / "run" / "checkpoint-10")
    away = "http://127.0.0.1:9/api"
    variables = {"PREFECT_HOME": str(tmp_path / "home"), "PREFECT_API_URL": away, name: value}
    ended = in_a_shell(f"{CKPTFLOW} {command} '{step}' --to 'file://{tmp_path}/models'", **variables)
    assert (ended.returncode, ended.stdout) == (2, b"")
    assert b"ckptflow: a setting in the environment is refused" in ended.stderr
    assert told in ended.stderr
    assert b"Traceback" not in ended.stderr


@pytest.mark.parametrize("command", ["watch", "deploy"])
def test_a_server_that_is_named_by_nothing_is_none(tmp_path: Path, command: str) -> None:
    to = f"--to 'file://{tmp_path}/models'"
    ended = in_a_shell(
        f"{CKPTFLOW} {command} '{tmp_path}' {to}", PREFECT_HOME=str(tmp_path / "home"), PREFECT_API_URL=""
    )
    assert (ended.returncode, ended.stdout) == (2, b"")
    assert b"no Prefect server is named" in ended.stderr


def test_a_server_that_is_away_is_told_in_words(tmp_path: Path) -> None:
    step = hf_step(tmp_path / "run" / "checkpoint-10")
    ended = in_a_shell(
        f"{CKPTFLOW} run '{step}' --to 'file://{tmp_path}/models' --json", PREFECT_API_URL="http://127.0.0.1:9/api"
    )
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert b"ckptflow: the Prefect server can't be reached" in ended.stderr
    assert b"Traceback" not in ended.stderr
