"""Questions to transformers: each in a process of its own, forked from one that has imported it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import TINY
from ckptflow.processes import askprocess
from ckptflow.processes.askprocess import ADDRESS_VARIABLE, Ended, Server, run_module

SKELETON = "ckptflow.validate.skeleton"


@pytest.fixture
def config_dir(tmp_path: Path) -> Path:
    """A directory with nothing but a config."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def describe(config_dir: Path, timeout_seconds: float = 100) -> Ended:
    return run_module(SKELETON, config_dir, "null", timeout_seconds)


def architecture(ended: Ended) -> str:
    assert ended.returncode == 0, ended.stderr
    return str(json.loads(ended.stdout)["architecture"])


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def children_of(pid: int) -> list[int]:
    """Processes that a process has started and that have not ended."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").exists()


def test_what_a_process_prints_and_how_it_ends_come_back(config_dir: Path) -> None:
    assert architecture(describe(config_dir)) == "LlamaForCausalLM"
    unknown = run_module("ckptflow.no_such_module", config_dir, "", 100)
    assert unknown.returncode == 1
    assert "No module named ckptflow.no_such_module" in unknown.stderr
    foreign = run_module("json.tool", config_dir / "config.json", "", 100)
    assert foreign.returncode == 1
    assert "json.tool is not a module of ckptflow" in foreign.stderr


def test_a_process_that_takes_too_long_is_ended(config_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(config_dir / "never.json")
    (config_dir / "config.json").unlink()
    (config_dir / "config.json").symlink_to("never.json")  # whoever opens it waits for a writer
    with Server() as server:
        monkeypatch.setenv(ADDRESS_VARIABLE, server.address)
        with pytest.raises(TimeoutError):
            describe(config_dir, timeout_seconds=0.2)  # before transformers is imported
        (config_dir / "config.json").unlink()
        (config_dir / "config.json").write_text(json.dumps(TINY))
        assert architecture(describe(config_dir)) == "LlamaForCausalLM"
        (config_dir / "config.json").unlink()
        (config_dir / "config.json").symlink_to("never.json")
        with pytest.raises(TimeoutError):
            describe(config_dir, timeout_seconds=1)
        assert eventually(lambda: children_of(server.process.pid) == [])


def test_a_question_is_answered_without_any_server(config_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, str(config_dir / "ended"))
    monkeypatch.setattr(askprocess, "_own_address", lambda: str(config_dir / "ended too"))
    unknown = run_module("ckptflow.no_such_module", config_dir, "", 100)
    assert unknown.returncode == 1
    assert "No module named ckptflow.no_such_module" in unknown.stderr


def test_a_server_that_nobody_asks_ends_and_leaves_nothing() -> None:
    with Server(idle_seconds=0.1) as server:
        assert server.process.wait(60) == 0
        assert not Path(server.address).parent.exists()


def test_a_server_ends_with_the_process_that_started_it_however_that_ends() -> None:
    code = "import signal; from ckptflow.processes.askprocess import Server"
    wait = "s = Server(); print(s.process.pid, flush=True); signal.pause()"
    starter = subprocess.Popen(
        [sys.executable, "-c", f"{code}; {wait}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    with starter:
        assert starter.stdout is not None
        server = int(starter.stdout.readline())
        assert is_running(server)
        starter.kill()
    assert eventually(lambda: not is_running(server))


def test_where_the_server_has_ended_another_one_imports_nothing_from_beside_a_checkpoint(config_dir: Path) -> None:
    was_run = config_dir / "was-run"
    for name in ("torch", "transformers", "json", "ckptflow"):
        (config_dir / f"{name}.py").write_text(f"from pathlib import Path\nPath({str(was_run)!r}).touch()\n")
    code = "import pathlib; from ckptflow.validate.skeleton import describe_model\n"
    code += "print(describe_model(pathlib.Path('.')).architecture)"
    with Server() as server:
        server.process.kill()
        server.process.wait()
        asker = [sys.executable, "-P", "-c", code]
        environment = {**os.environ, **server.environment()}
        done = subprocess.run(asker, cwd=config_dir, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "LlamaForCausalLM\n", done.stderr
    assert not was_run.exists()
