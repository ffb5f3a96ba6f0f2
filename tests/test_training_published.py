"""Real training loops announce their checkpoints, and each becomes a published model with no further command.

A real server with the deployments that ``ckptflow deploy`` makes, a worker per pool, nothing that watches a disk:
only the trainers say that there is something to do.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from callback_training import LOOPS, SAVE_EVERY, STEPS, whole_weights
from checkpoints import TINY, write_model_directory
from ckptflow.callbacks.events import READY_EVENT
from watchlab import DEPLOYMENTS, Lab, running_lab, step_of, wait_until

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.timeout(1800)]

SUPPORT = Path(__file__).resolve().parent / "support"
SAVED = tuple(range(SAVE_EVERY, STEPS + 1, SAVE_EVERY))
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """All loops run at once, and have ended with everything announced when this is over."""
    with running_lab(tmp_path_factory.mktemp("site")) as lab:
        model_dir = lab.home.parent / "model"
        write_model_directory(model_dir, TINY)
        lab.deploy("--gpus", "2", "--runs-at-once", "0", "--file", str(without_forward_pass(lab.home / "prefect.yaml")))
        lab.start_worker("ckptflow")
        lab.start_worker(limit=2)
        loops = [start_loop(lab, loop, model_dir) for loop in LOOPS]
        for loop, process in zip(LOOPS, loops, strict=True):
            log = lab.home / f"loop-{loop}.log"
            assert process.wait() == 0, log.read_text()
            assert '"sent": true' in log.read_text()
        yield lab


def without_forward_pass(path: Path) -> Path:
    """The project's own deployments, but no model is loaded with transformers: that takes longer than all the rest."""
    content, making = DEPLOYMENTS.read_text("utf-8"), "  making: &making\n"
    assert content.count(making) == 1
    path.write_text(content.replace(making, f"{making}    validation: {{forward: false}}\n"), "utf-8")
    return path


def start_loop(lab: Lab, loop: str, model_dir: Path) -> subprocess.Popen[bytes]:
    places = (str(lab.runs_dir / loop), str(model_dir))
    return lab.start(f"loop-{loop}", "callback_training", loop, *places, PYTHONPATH=str(SUPPORT))


@pytest.mark.parametrize("loop", LOOPS)
def test_each_checkpoint_that_training_announces_is_published_once(site: Lab, loop: str) -> None:
    wait_until(lambda: site.is_published(loop, *SAVED), f"the models of {loop} are published")
    wait_until(lambda: all(run["state_type"] in ENDED for run in site.runs(loop)), "all runs ended")
    runs = site.runs(loop)
    assert Counter(map(step_of, runs)) == Counter(SAVED)
    assert {run["state_name"] for run in runs} == {"Completed"}
    # The run that is started for a checkpoint is told to everybody by an event too, which is not the trainer's.
    events = [event for event in site.events(READY_EVENT) if f"/{loop}/" in event["payload"]["path"]]
    announced = [event for event in events if event["resource"]["ckptflow.announced-by"] == "trainer"]
    assert Counter(event["payload"]["global_step"] for event in announced) == Counter(SAVED)
    for event in announced:
        assert {"loss", "train_loss"} & event["payload"]["metrics"].keys()
        assert "norm" not in event["payload"]["metrics"]  # a DTensor: rank 0 alone would wait for ever
    for step in SAVED:
        published = load_file(site.models_dir / loop / f"step-{step}" / "model.safetensors")
        trained = trained_weights(site.runs_dir / loop, step)
        assert published.keys() == trained.keys()
        assert all(torch.equal(published[name], value.to(torch.bfloat16)) for name, value in trained.items())


def trained_weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """FQN → weights of a step, read by the framework that wrote them."""
    if run_dir.name == "transformers":
        return load_file(run_dir / f"checkpoint-{step}" / "model.safetensors")
    if run_dir.name == "lightning":
        state = torch.load(run_dir / f"step={step}.ckpt", weights_only=True)["state_dict"]
        return {name.removeprefix("model."): value for name, value in state.items()}
    return load_file(whole_weights(run_dir, step))
