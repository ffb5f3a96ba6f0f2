"""DCP and Megatron checkpoints of the real frameworks: every value against the reference, bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptflow.errors import CheckpointError
from ckptflow.formats.base import Format, Location, ReadOptions
from ckptflow.formats.dcp import DcpDirectory
from ckptflow.formats.dcp_hf import DcpHuggingFaceShards
from ckptflow.formats.megatron_dist import MegatronDistCheckpoint
from ckptflow.formats.megatron_legacy import MegatronLegacyCheckpoint
from conftest import FIXTURES_ENV
from reading import read_source

FORMATS: tuple[Format, ...] = (
    MegatronDistCheckpoint(),
    MegatronLegacyCheckpoint(),
    DcpHuggingFaceShards(),
    DcpDirectory(),
)
PREFIXES = ("dcp_", "meg_", "acc-fsdp1-sharded", "acc-fsdp2-sharded", "broken_dcp", "broken_meg")


def listed(expect: str) -> list[Any]:
    root = Path(os.environ.get(FIXTURES_ENV, Path(__file__).resolve().parents[2] / "shared" / "fixtures"))
    cases = json.loads((root / "cases.json").read_text()) if (root / "cases.json").is_file() else []
    chosen = [c for c in cases if c["expect"] == expect and c["fixture"].startswith(PREFIXES)]
    return [pytest.param(c, id=f"{c['fixture']}{c.get('id', '')}") for c in chosen]


def locate(case: dict[str, Any], fixtures: Path) -> tuple[Format, Location, ReadOptions]:
    directory = fixtures / case["fixture"]
    format_, location = next((f, loc) for f in FORMATS for loc in f.find(directory / case["path"]))
    config = directory / "hf_config" if "--config" in case["args"] else None
    return format_, location, ReadOptions(config_dir=config)


@pytest.mark.parametrize("case", listed("values"))
def test_every_value_is_that_of_the_reference(fixtures_dir: Path, case: dict[str, Any]) -> None:
    format_, location, options = locate(case, fixtures_dir)
    assert format_.check(location).state == "complete"
    manifest = format_.read(location, options)
    expected = load_file(fixtures_dir / case["fixture"] / case["expected"])
    assert set(manifest.tensors) == set(expected)
    for name, tensor in expected.items():
        found = read_source(manifest.tensors[name])
        assert found.shape == tuple(tensor.shape), name
        assert found.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes(), name


@pytest.mark.parametrize("case", listed("refuse"))
def test_a_broken_checkpoint_is_neither_complete_nor_read(fixtures_dir: Path, case: dict[str, Any]) -> None:
    format_, location, options = locate(case, fixtures_dir)
    assert format_.check(location).state != "complete"
    with pytest.raises(CheckpointError):
        format_.read(location, options)
