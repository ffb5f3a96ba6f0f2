"""One checkpoint that was published for the whole session; loaded by ``pytest_plugins``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flowruns import Finished, FlowLab
from servers.seaweed import S3Server

RUN = "llama-sft"
OPTIONS = ("--max-shard-size", "6MB", "--keep-dtype", "lm_head.weight")
WEIGHT_FILES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What ``ckptflow run`` did with one checkpoint, and what the Prefect server says of it.

    Attributes:
        stored: files that it left in Prefect's storage of results.
    """

    path: Path
    uri: str
    finished: Finished
    run: Mapping[str, Any]
    stored: frozenset[str]

    @property
    def destination(self) -> str:
        """Where the model is."""
        return f"{self.uri}/{RUN}/step-120"


@pytest.fixture(scope="session")
def published(lab: FlowLab, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Published:
    """A Llama of 6.4 million parameters on two ranks, published to S3 as three weight files."""
    from checkpoints import TINY, write_fsdp_step

    config = {
        **TINY,
        "hidden_size": 256,
        "intermediate_size": 688,
        "head_dim": 64,
        "vocab_size": 4096,
        "num_hidden_layers": 6,
    }
    path = write_fsdp_step(tmp_path_factory.mktemp("published") / RUN, 120, config=config)
    uri = "s3://models"
    client = s3_server.client()
    client.create_bucket(Bucket="models")
    client.close()
    before = stored_results(lab)
    finished = lab.run(path, uri, *OPTIONS)
    (run,) = lab.runs(f"post-training {RUN} step-120")
    return Published(path=path, uri=uri, finished=finished, run=run, stored=stored_results(lab) - before)


def stored_results(lab: FlowLab) -> frozenset[str]:
    """Files in Prefect's storage of results; runs that fail leave their exceptions there."""
    directory = Path(lab.environment["PREFECT_HOME"], "storage")
    return frozenset(path.name for path in directory.iterdir()) if directory.exists() else frozenset()
