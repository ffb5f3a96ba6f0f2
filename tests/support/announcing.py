"""What tests of the callbacks share: a queue of their own, and a model to train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints import TINY, write_model_directory
from ckptflow.callbacks import announce, sending


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Iterator[sending.Sender]:
    """A queue of this test's own, which is empty again when it ends."""
    for name in ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", *("RANK", "DMLC_WORKER_ID")):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made = sending.Sender()
    monkeypatch.setattr(announce, "_sender", made)
    yield made
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    made._at_exit()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Config and tokenizer of a tiny Llama."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_model_directory(directory, TINY)
    return directory
