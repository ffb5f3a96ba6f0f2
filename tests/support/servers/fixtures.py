"""Fixtures that start real servers; loaded by ``pytest_plugins``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptflow.demo.prefect_server import RunningPrefectServer, start_prefect_server
from flowruns import FlowLab, flow_environment
from servers.prefect_database import put_migrated_database
from servers.seaweed import S3Server, running_seaweed


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One SeaweedFS for the whole session; a test that shares the bucket takes a prefix of its own."""
    with running_seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def s3_bucket_name(s3_server: S3Server) -> str:
    """A bucket that is there; a new one costs SeaweedFS a second."""
    client = s3_server.client()
    client.create_bucket(Bucket="shared-by-tests")
    client.close()
    return "shared-by-tests"


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPrefectServer]:
    """One Prefect server for the whole session; a test finds its own flow runs by a run name of its own."""
    directory = tmp_path_factory.mktemp("prefect")
    put_migrated_database(directory / "server")
    server = start_prefect_server(directory / "server", log_path=directory / "server.log")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def lab(prefect_server: RunningPrefectServer, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> FlowLab:
    """What tests of flows need: both servers, and a client's home of its own."""
    home = tmp_path_factory.mktemp("client")
    return FlowLab(server=prefect_server, environment=flow_environment(prefect_server, home, s3_server.environment()))
