"""Shared by all tests: where the real checkpoints are."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from ckptflow.processes.askprocess import ADDRESS_VARIABLE, Server
from servers.prefect_database import DIRECTORY_VARIABLE

pytest_plugins = [
    "servers.fixtures",
    "publishing",
    "published_run",
    "retention_run",
    "gpu_processes",
    "announcing",
    "hub_faults",
]

FIXTURES_ENV = "CKPTFLOW_FIXTURES"
AN_HOUR_SECONDS = 3600
AN_HOUR_NS = AN_HOUR_SECONDS * 10**9


def pytest_configure(config: pytest.Config) -> None:
    """What all processes of the session share: one that has imported transformers, and a migrated database."""
    if ADDRESS_VARIABLE not in os.environ:  # pytest-xdist's workers have it from the process that started them
        server = Server(idle_seconds=AN_HOUR_SECONDS)
        directory = tempfile.TemporaryDirectory(prefix="ckptflow-tests-")
        shared = server.environment() | {DIRECTORY_VARIABLE: directory.name}
        os.environ |= shared
        config.add_cleanup(lambda: [os.environ.pop(name) for name in shared])
        config.add_cleanup(directory.cleanup)
        config.add_cleanup(server.stop)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long begin first: else one of them is left to one process at the end."""
    longest = {item.path for item in items if item.get_closest_marker("timeout") is not None}
    with_services = {item.path for item in items if item.get_closest_marker("service") is not None}
    items.sort(key=lambda item: (item.path not in longest & with_services, item.path not in with_services))


@pytest.fixture(scope="session")
def fixtures_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real checkpoints written by the real frameworks, as if an hour ago; skips where there are none.

    Young files may still be written to, and a fresh clone has none but young ones.
    """
    default = Path(__file__).resolve().parents[2] / "shared" / "fixtures"
    found = Path(os.environ.get(FIXTURES_ENV, default))
    if not (found / "cases.json").is_file():
        pytest.skip(f"no checkpoint fixtures at {found}; set {FIXTURES_ENV}")
    copy = tmp_path_factory.mktemp("checkpoints") / "fixtures"
    shutil.copytree(found, copy, symlinks=True)
    for path in (copy, *copy.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | 0o200)
            times = path.stat()
            os.utime(path, ns=(times.st_atime_ns - AN_HOUR_NS, times.st_mtime_ns - AN_HOUR_NS))
    return copy
