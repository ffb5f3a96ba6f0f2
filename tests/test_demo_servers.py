"""The demo's Prefect server is private to the demo, and nothing of it is left when it stops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptflow.demo.prefect_server import RunningPrefectServer, start_prefect_server, stop_process_group
from ckptflow.errors import CkptflowError

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPrefectServer]:
    directory = tmp_path_factory.mktemp("prefect")
    running = start_prefect_server(directory / "home", log_path=directory / "server.log")
    try:
        yield running
    finally:
        running.stop()


def test_its_ui_asks_the_api_at_the_port_it_was_given(server: RunningPrefectServer) -> None:
    with urllib.request.urlopen(f"{server.ui_url}/ui-settings") as response:
        settings = json.load(response)
    assert settings["api_url"] == server.api_url


def test_it_listens_on_loopback_only(server: RunningPrefectServer) -> None:
    port = int(server.ui_url.rpartition(":")[2])
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    addresses = {fields[1].split(":")[0] for fields in listening if fields[1].endswith(f":{port:04X}")}
    assert addresses == {"0100007F"}  # 127.0.0.1, little-endian


def test_it_keeps_its_data_in_its_home_and_knows_no_runs_of_others(server: RunningPrefectServer) -> None:
    assert (server.home / "prefect.db").is_file()
    assert server.flow_runs() == []


def test_a_flow_run_is_listed_with_the_page_that_shows_it(server: RunningPrefectServer) -> None:
    flow = "from prefect import flow\n@flow(flow_run_name='seen')\ndef f(): pass\nf()"
    env = {**os.environ, **server.client_env()}
    subprocess.run([sys.executable, "-c", flow], env=env, check=True, capture_output=True, timeout=120)
    (run,) = server.flow_runs()
    assert (run.name, run.state) == ("seen", "Completed")
    page = urllib.request.Request(run.url, headers={"Accept": "text/html"})
    with urllib.request.urlopen(page) as response:
        assert "<html" in response.read().decode()


def test_a_server_that_ends_at_once_is_reported_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "prefect.db").write_text("this is no database " * 500)
    with pytest.raises(CkptflowError, match="did not start") as raised:
        start_prefect_server(tmp_path / "home", log_path=tmp_path / "server.log", tries=1)
    assert raised.value.file == str(tmp_path / "server.log")
    assert "database" in (tmp_path / "server.log").read_text()


def test_stopping_ends_the_children_of_a_process_too(tmp_path: Path) -> None:
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"1\n"
        stop_process_group(process)
        # End of file: nobody holds the other end of the pipe any more.
        assert process.stdout.read() == b""
    stop_process_group(process)
