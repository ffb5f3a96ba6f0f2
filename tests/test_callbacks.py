"""Callbacks inside real training loops: each checkpoint is announced once, after it is complete, and nothing waits."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from callback_training import run_lightning, run_trainer
from checkpoints import write_fsdp_step
from ckptflow import callbacks
from ckptflow.callbacks import events, numbers, sending
from ckptflow.demo.prefect_server import RunningPrefectServer, free_loopback_port
from ckptflow.discovery.discover import judge
from ckptflow.discovery.signatures import bytes_below
from ckptflow.discovery.watching import ReadyCheckpoint
from ckptflow.formats.registry import locate
from mxnet_writer import array_list, dense
from serverapi import ask_for_events
from servers.proxy import Request, running_proxy

# Of Lightning's own: deprecations in torch, and advice.
LIGHTNING = pytest.mark.filterwarnings("ignore")

pytestmark = pytest.mark.usefixtures("sender")


@pytest.fixture
def server(prefect_server: RunningPrefectServer, monkeypatch: pytest.MonkeyPatch) -> RunningPrefectServer:
    monkeypatch.setenv("PREFECT_API_URL", prefect_server.api_url)
    return prefect_server


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A server that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield listener.getsockname()[1]


def ready_events(server: RunningPrefectServer, below: Path, count: int) -> list[dict[str, Any]]:
    """Events about checkpoints below a directory, by step, once there are ``count``; the server stores them late."""
    deadline = time.monotonic() + 60
    while True:
        found = ask_for_events(server.api_url, events.READY_EVENT)
        mine = [event for event in found if event["payload"]["path"].startswith(f"{below}/")]
        if len(mine) >= count or time.monotonic() > deadline:
            return sorted(mine, key=lambda event: str(event["payload"]["global_step"]).zfill(9))
        time.sleep(0.2)


@pytest.mark.service
@LIGHTNING
def test_lightning_announces_a_run_that_is_resumed_where_it_was_left(
    server: RunningPrefectServer, model_dir: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run_lightning(run_dir, model_dir, callbacks.LightningCallback(), steps=2, save_last="link")
    resume_from = run_dir / "step=2.ckpt"
    run_lightning(run_dir, model_dir, callbacks.LightningCallback(), resume_from=resume_from, save_last="link")
    assert (run_dir / "last.ckpt").is_symlink()
    assert_announced_once(server, run_dir, "step=2.ckpt", "step=4.ckpt")


@pytest.mark.service
@LIGHTNING
def test_weights_alone_are_announced_for_the_older_package_of_lightning(
    server: RunningPrefectServer, model_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("pytorch_lightning")
    callback = callbacks.LightningCallback()
    assert isinstance(callback, sys.modules["pytorch_lightning"].Callback)
    run_lightning(tmp_path / "run", model_dir, callback, package="pytorch_lightning", save_weights_only=True)
    assert_announced_once(server, tmp_path / "run", "step=2.ckpt", "step=4.ckpt")


def assert_announced_once(server: RunningPrefectServer, run_dir: Path, *names: str) -> None:
    """One event per checkpoint, of steps 2 and 4, with a metric."""
    assert callbacks.wait_until_announced(60)
    found = ready_events(server, run_dir, len(names))
    assert [event["payload"]["path"] for event in found] == [str(run_dir / name) for name in names]
    assert [event["payload"]["global_step"] for event in found] == [2, 4]
    assert all({"loss", "train_loss"} & event["payload"]["metrics"].keys() for event in found)


@pytest.mark.service
@LIGHTNING
@pytest.mark.parametrize(
    ("train", "names"),
    [
        (lambda *places: run_trainer(*places, callbacks.HuggingFaceCallback()), ("checkpoint-2", "checkpoint-4")),
        (lambda *places: run_lightning(*places, callbacks.LightningCallback()), ("step=2.ckpt", "step=4.ckpt")),
    ],
    ids=["transformers", "lightning"],
)
def test_training_ends_before_the_server_has_answered_a_word(
    prefect_server: RunningPrefectServer,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    train: Callable[[Path, Path], None],
    names: tuple[str, str],
) -> None:
    monkeypatch.setattr(events, "TIMEOUT_SECONDS", 3600.0)  # whoever waits for an answer waits for ever
    is_asked, may_answer = threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        is_asked.set()
        may_answer.wait()

    with running_proxy(prefect_server.ui_url) as proxy:
        proxy.interfere = hold
        monkeypatch.setenv("PREFECT_API_URL", f"{proxy.endpoint_url}/api")
        train(tmp_path / "run", model_dir)
        assert is_asked.wait(60)
        assert proxy.requests == []
        assert not callbacks.wait_until_announced(0)
        may_answer.set()
        assert_announced_once(prefect_server, tmp_path / "run", *names)


@pytest.mark.service
def test_an_event_that_a_slow_server_takes_without_an_answer_is_not_doubled(
    prefect_server: RunningPrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(sending, "RETRY_SECONDS", 0.1)
    is_over = threading.Event()

    def be_late(request: Request) -> None:
        is_over.wait(30)

    with running_proxy(prefect_server.ui_url) as proxy:
        proxy.interfere = be_late
        monkeypatch.setenv("PREFECT_API_URL", f"{proxy.endpoint_url}/api")
        callbacks.checkpoint_saved(write_fsdp_step(tmp_path, 10))
        assert not callbacks.wait_until_announced(2.0)  # given up at least once, and each try still reaches the server
        monkeypatch.setattr(events, "TIMEOUT_SECONDS", 60.0)
        is_over.set()
        assert callbacks.wait_until_announced(60)
        deadline = time.monotonic() + 60
        while len(proxy.requests) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
    assert len(proxy.requests) >= 2
    callbacks.checkpoint_saved(write_fsdp_step(tmp_path, 20))  # stored after all that came before
    monkeypatch.setenv("PREFECT_API_URL", prefect_server.api_url)
    assert callbacks.wait_until_announced(60)
    assert [event["payload"]["global_step"] for event in ready_events(prefect_server, tmp_path, 2)] == [10, 20]


@pytest.mark.service
def test_epochs_are_announced_after_the_convention_of_mxnet(server: RunningPrefectServer, tmp_path: Path) -> None:
    announce_epoch = callbacks.do_checkpoint(str(tmp_path / "model"), period=2)
    for epoch in range(4):
        array_list(tmp_path / f"model-{epoch + 1:04d}.params", {"arg:fc_weight": dense(np.ones((2, 2), np.float32))})
        announce_epoch(epoch, None, {}, {})
    assert callbacks.wait_until_announced(60)
    names = [Path(event["payload"]["path"]).name for event in ready_events(server, tmp_path, 2)]
    assert names == ["model-0002.params", "model-0004.params"]


@pytest.mark.service
def test_the_event_is_the_one_that_the_watcher_sends(server: RunningPrefectServer, tmp_path: Path) -> None:
    serverruns = pytest.importorskip("ckptflow_flows.serverruns")
    step_dir = write_fsdp_step(tmp_path, 10)
    callbacks.checkpoint_saved(step_dir)
    assert callbacks.wait_until_announced(60)
    (sent,) = ready_events(server, tmp_path, 1)
    found = judge(locate(step_dir), 0.0, time.time())
    assert found is not None
    checkpoint = ReadyCheckpoint(found=found, nbytes=bytes_below(found.location.path))
    wanted = serverruns.ready_event(checkpoint, announced_by="trainer", key="a").model_dump(mode="json")
    assert (sent["event"], sent["resource"], sent["payload"]) == (
        wanted["event"],
        wanted["resource"],
        wanted["payload"],
    )


@pytest.mark.service
def test_nothing_is_sent_before_the_files_of_all_ranks_are_there(
    server: RunningPrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "LOOK_SECONDS", 0.05)
    step_dir = write_fsdp_step(tmp_path, 10)
    late = step_dir / "actor" / "model_world_size_2_rank_1.pt"
    late.rename(tmp_path / "late")
    callbacks.checkpoint_saved(step_dir)
    assert not callbacks.wait_until_announced(1.0)
    (tmp_path / "late").rename(late)
    assert callbacks.wait_until_announced(60)
    assert len(ready_events(server, tmp_path, 1)) == 1


@pytest.mark.service
def test_the_last_checkpoint_of_a_script_that_ends_at_once_is_announced(
    server: RunningPrefectServer, tmp_path: Path
) -> None:
    step_dir = write_fsdp_step(tmp_path, 10)
    program = "import sys; from ckptflow.callbacks import checkpoint_saved; checkpoint_saved(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", program, str(step_dir)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(ready_events(server, tmp_path, 1)) == 1


@pytest.mark.service
def test_a_server_that_comes_back_gets_what_was_saved_meanwhile(
    prefect_server: RunningPrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "RETRY_SECONDS", 0.1)
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{free_loopback_port()}/api")
    for step in (10, 20):
        callbacks.checkpoint_saved(write_fsdp_step(tmp_path / "run", step))
    assert not callbacks.wait_until_announced(1.0)
    monkeypatch.setenv("PREFECT_API_URL", prefect_server.api_url)
    assert callbacks.wait_until_announced(60)
    assert [event["payload"]["global_step"] for event in ready_events(prefect_server, tmp_path / "run", 2)] == [10, 20]


def test_a_script_ends_though_the_server_never_answers(silent_port: int, tmp_path: Path) -> None:
    step_dir = write_fsdp_step(tmp_path, 10)
    program = (
        "import sys\n"
        "from ckptflow.callbacks import checkpoint_saved, events, sending\n"
        "events.TIMEOUT_SECONDS, sending.EXIT_SECONDS = 3600.0, 1.0\n"
        "checkpoint_saved(sys.argv[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(step_dir)],
        env={**os.environ, "PREFECT_API_URL": f"http://127.0.0.1:{silent_port}/api"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "could not be announced; the sweep finds them" in done.stderr


def test_other_ranks_announce_nothing(sender: sending.Sender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks.checkpoint_saved(tmp_path, rank=1)
    monkeypatch.setenv("RANK", "3")
    callbacks.checkpoint_saved(tmp_path)
    assert sender.wait(0)
    assert sender._thread is None


def test_nothing_that_a_caller_passes_breaks_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad: Any = object()
    callbacks.checkpoint_saved(bad)
    callbacks.checkpoint_saved(tmp_path, global_step=bad)
    callbacks.checkpoint_saved(tmp_path, metrics=bad)
    assert len([record for record in caplog.records if "is not announced" in record.message]) == 3


def test_without_a_server_one_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        callbacks.checkpoint_saved(tmp_path)
    assert callbacks.wait_until_announced(10)
    assert [record.message for record in caplog.records] == [
        "PREFECT_API_URL is not set: checkpoints are not announced"
    ]


def test_the_queue_is_bounded_and_keeps_the_newest(
    sender: sending.Sender, silent_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{silent_port}/api")
    step_dir = write_fsdp_step(tmp_path, 10)
    for step in range(3 * sending.MOST_WAITING):
        callbacks.checkpoint_saved(step_dir, global_step=step)
    assert len(sender._waiting) <= sending.MOST_WAITING
    assert sender._waiting[-1].global_step == 3 * sending.MOST_WAITING - 1


def test_only_plain_finite_numbers_are_metrics() -> None:
    given = {"loss": torch.tensor(1.5), "acc": np.float32(0.5), "step": 3, "nan": float("nan"), "name": "x", "no": True}
    trained = {"loss with a graph": torch.tensor(2.0, requires_grad=True), "of one": np.ones((1, 1))}
    others = {"many": [1, 2], "rows": torch.ones(2), "elsewhere": torch.ones((), device="meta"), "huge": 10**400}
    assert numbers.plain_numbers({**given, **trained, **others}) == {
        **{"loss": 1.5, "acc": 0.5, "step": 3.0},
        **{"loss with a graph": 2.0, "of one": 1.0},
    }


def test_credentials_of_the_environment_are_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api/")
    monkeypatch.setenv("PREFECT_API_KEY", "secret-key")
    monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", '{"X-Team": "a"}')
    api = events.PrefectApi.from_environment()
    assert api is not None
    assert api.url == "http://127.0.0.1:1/api"
    assert (api.headers["Authorization"], api.headers["X-Team"]) == ("Bearer secret-key", "a")
    assert "secret" not in repr(api)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:pass")
    with_password = events.PrefectApi.from_environment()
    assert with_password is not None
    assert with_password.headers["Authorization"] == "Basic YWRtaW46cGFzcw=="


@LIGHTNING
def test_the_callbacks_can_be_pickled_for_spawned_trainers() -> None:
    for callback in (callbacks.HuggingFaceCallback(), callbacks.LightningCallback()):
        assert type(pickle.loads(pickle.dumps(callback))) is type(callback)  # noqa: S301 - our own bytes


@pytest.mark.service
def test_a_later_announcement_does_not_wait_for_one_that_is_not_complete(
    server: RunningPrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "LOOK_SECONDS", 0.01)
    callbacks.checkpoint_saved(tmp_path / "nothing")
    complete = write_fsdp_step(tmp_path / "run", 20)
    callbacks.checkpoint_saved(complete)
    assert [event["payload"]["path"] for event in ready_events(server, tmp_path, 1)] == [str(complete / "actor")]
    assert not callbacks.wait_until_announced(0)
    monkeypatch.setattr(sending, "COMPLETE_SECONDS", 0.0)
    assert callbacks.wait_until_announced(10)
