"""A Hub repository whose requests meet faults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptflow.publish import PublishSettings
from publishing import HubRepo
from servers.hub import Fault, HubRequest, running_hub

FAST = PublishSettings(max_attempts=4, backoff_seconds=0.01, backoff_limit_seconds=0.05)
COMMIT = r"/commit/"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubRepo]:
    with running_hub(tmp_path / "hub") as hub:
        for name, value in hub.environment().items():
            monkeypatch.setenv(name, value)
        yield HubRepo(hub=hub)


def once(pattern: str, *faults: Fault, method: str = "POST") -> object:
    """An interference: the first requests of a kind meet these faults, later ones none."""
    left = list(faults)

    def interfere(request: HubRequest) -> Fault | None:
        is_meant = request.method == method and re.search(pattern, request.path) is not None
        return left.pop(0) if is_meant and left else None

    return interfere


def always(pattern: str, fault: Fault, method: str = "POST") -> object:
    return lambda request: fault if request.method == method and re.search(pattern, request.path) else None


def content_requests(store: HubRepo) -> list[HubRequest]:
    return [*store.hub.seen("PUT", "/lfs/"), *store.hub.seen("POST", COMMIT)]
