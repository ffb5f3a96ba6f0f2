"""The flow seed-model against a real Prefect server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoints import TINY, write_model_directory
from ckptflow.validate.files import check_checksums
from flowruns import FlowLab

pytestmark = pytest.mark.service

PROGRAM = """
import json, sys
from ckptflow_flows.seed_model import SeedModel, seed_model
states = [seed_model(SeedModel(**case), return_state=True) for case in json.load(sys.stdin)]
print(json.dumps([{"name": s.name, "type": s.type.value, "message": s.message} for s in states]))
"""


def run_flows(lab: FlowLab, *cases: dict[str, Any]) -> list[dict[str, Any]]:
    """Final states, one after the other in one process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(cases),
        env=dict(lab.environment),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    states: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return states


def test_a_model_is_made_with_one_artifact_and_what_is_wrong_is_refused(lab: FlowLab, tmp_path: Path) -> None:
    write_model_directory(tmp_path / "config", TINY)
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "config.json").write_text('{"model_type": "mine"}')
    out = tmp_path / "fresh-llama"
    good = {"config": str(tmp_path / "config"), "out": str(out), "init_std": "small-init", "seed": 5}
    made, again, refused = run_flows(
        lab, good, good, {"config": str(tmp_path / "strange"), "out": str(tmp_path / "none")}
    )
    assert (made["type"], made["message"].partition(",")[0]) == ("COMPLETED", "30 tensors")
    assert again == made
    assert (refused["type"], refused["name"]) == ("FAILED", "Refused")
    assert "not known to this transformers" in refused["message"]
    record = json.loads((out / "ckptflow.json").read_text())
    assert check_checksums(out, record, lambda _: None, 1).status == "passed"
    first = lab.runs("seed-model fresh-llama")[0]
    (artifact,) = lab.artifacts(first)
    assert artifact["key"] == "seed-model"
    assert sum(row["tensors"] for row in artifact["data"]) == 30
    assert any(row["filled with"].startswith("normal, mean 0, std 0.11") for row in artifact["data"])
