"""The scripts in ``examples/`` do what they say, for somebody who starts them as their first lines tell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoints import write_fsdp_step
from flowcases import first_nan, kill, wait_for
from flowruns import FlowLab

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def convert_prove_publish(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(EXAMPLES / "convert_prove_publish.py")
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)


def test_a_checkpoint_is_converted_proven_and_published_from_python(tmp_path: Path) -> None:
    step = write_fsdp_step(tmp_path / "my-run")
    done = convert_prove_publish(str(step), str(tmp_path / "out"), f"file://{tmp_path}/models")
    assert done.returncode == 0, done.stderr
    assert f"file://{tmp_path}/models: " in done.stdout
    assert (tmp_path / "models" / "ckptflow.json").is_file()


def test_a_checkpoint_that_is_refused_ends_in_words(tmp_path: Path) -> None:
    step = write_fsdp_step(tmp_path / "my-run", changes={"lm_head.weight": first_nan})
    done = convert_prove_publish(str(step), str(tmp_path / "out"), f"file://{tmp_path}/models")
    assert done.returncode == 1
    assert done.stderr.startswith("a tensor holds NaN or Inf")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "models").exists()


@pytest.mark.service
@pytest.mark.timeout(240)
def test_each_published_model_is_evaluated(lab: FlowLab, tmp_path: Path) -> None:
    text = tmp_path / "held-back.txt"
    text.write_text("it is a truth universally acknowledged that a man must want it")
    script = [sys.executable, str(EXAMPLES / "evaluate_published.py"), str(text)]
    with open(tmp_path / "served.log", "w") as log:
        serving = subprocess.Popen(script, env=lab.environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deployed = {"deployments": {"name": {"any_": ["each-published-model"]}}}
        wait_for(lambda: bool(lab.ask("deployments/filter", deployed)))
        step = write_fsdp_step(tmp_path / "evaluated-run")
        uri = f"file://{tmp_path}/models"
        assert lab.run(step, uri, "--no-forward").status == 0
        flow = {"flows": {"name": {"any_": ["evaluate-published"]}}}
        ended = {"flow_runs": {"state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED"]}}}}
        wait_for(lambda: bool(lab.ask("flow_runs/filter", {**flow, **ended})), seconds=120)
        [run] = lab.ask("flow_runs/filter", {**flow, **ended})
        [table] = lab.artifacts(run)
    finally:
        kill(serving)
        # The server serves other tests, too, whose models nobody is left to evaluate.
        delete = [sys.executable, "-m", "prefect", "--no-prompt", "deployment", "delete"]
        subprocess.run([*delete, "evaluate-published/each-published-model"], env=lab.environment, check=True)
    assert run["state_type"] == "COMPLETED", (tmp_path / "served.log").read_text()
    [row] = table["data"]
    assert (row["model"], row["step"]) == (f"{uri}/evaluated-run/step-10", 10)
    assert torch.isfinite(torch.tensor(row["perplexity"]))
