"""Speed and metrics in the style of MXNet's callbacks, in training loops and in the pipeline's own steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from callback_training import run_lightning, run_trainer
from checkpoints import write_fsdp_step
from ckptflow import callbacks

pytestmark = pytest.mark.usefixtures("sender")


@pytest.mark.filterwarnings("ignore")  # of Lightning's own: deprecations in torch, and advice
@pytest.mark.parametrize("train", ["transformers", "lightning"])
def test_speed_and_metrics_are_logged_inside_the_trainers(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, train: str
) -> None:
    caplog.set_level("INFO", "ckptflow")

    def broken(param: callbacks.BatchEnd) -> None:
        raise ValueError("a mistake in somebody's callback")

    batch_end = [
        broken,
        callbacks.Speedometer(batch_size=2, frequent=2),
        callbacks.ProgressBar(total=4, length=4),
        callbacks.log_train_metric(2),
    ]
    if train == "transformers":
        with_reports = callbacks.HuggingFaceCallback(batch_end, callbacks.LogValidationMetrics())
        run_trainer(tmp_path / "run", model_dir, with_reports)
    else:
        run_lightning(
            tmp_path / "run", model_dir, callbacks.LightningCallback(batch_end, callbacks.LogValidationMetrics())
        )
    said = [record.getMessage() for record in caplog.records if record.name.startswith("ckptflow.callbacks")]
    assert len([line for line in said if "is not called again" in line]) == 1
    speeds = [line.split("\t") for line in said if "Speed: " in line]
    assert [line[0] for line in speeds] == ["Epoch[0] Batch [2]", "Epoch[0] Batch [4]"]
    assert all(any(part.startswith("loss=") for part in line) for line in speeds)
    assert [line for line in said if line.startswith("[")] == ["[=---] 25%", "[==--] 50%", "[===-] 75%", "[====] 100%"]
    assert [line.split(" Train-")[0] for line in said if line.startswith("Iter")] == [
        "Iter[0] Batch[2]",
        "Iter[0] Batch[4]",
    ]
    validated = [line for line in said if "Validation-" in line]
    assert len(validated) == 2
    assert all(f"Validation-{'eval' if train == 'transformers' else 'val'}_loss=" in line for line in validated)


Metric = dict[str, float]


def run_epochs(callback: Callable[[Any], None], batches: int, metric: Metric | None = None, seconds: float = 0) -> None:
    for batch in range(1, batches + 1):
        time.sleep(seconds)
        callback(callbacks.BatchEnd(epoch=0, nbatch=batch, eval_metric=metric))


def test_the_speedometer_tells_the_rate_of_a_real_loop(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    run_epochs(callbacks.Speedometer(batch_size=32, frequent=10), 40, {"loss": 0.5}, seconds=0.005)
    lines = [record.message for record in caplog.records]
    assert [line.split("\t")[0] for line in lines] == [f"Epoch[0] Batch [{n}]" for n in (10, 20, 30, 40)]
    assert all(line.endswith("loss=0.500000") for line in lines)
    rates = [float(line.split("Speed: ")[1].split()[0]) for line in lines]
    assert all(500 < rate < 32 / 0.005 * 1.01 for rate in rates)


class MXNetMetric:
    """The two methods of ``mx.metric.EvalMetric`` that callbacks use."""

    def __init__(self) -> None:
        self.resets = 0

    def get_name_value(self) -> list[tuple[str, float]]:
        return [("accuracy", 0.25)]

    def reset(self) -> None:
        self.resets += 1


def test_metrics_of_mxnet_are_logged_and_started_anew(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    metric = MXNetMetric()
    log = callbacks.log_train_metric(2, auto_reset=True)
    for batch in range(5):
        log(callbacks.BatchEnd(epoch=1, nbatch=batch, eval_metric=metric))
    callbacks.LogValidationMetrics()(callbacks.BatchEnd(epoch=1, nbatch=5, eval_metric=metric))
    assert [record.message for record in caplog.records] == [
        *(f"Iter[1] Batch[{n}] Train-accuracy=0.250000" for n in (0, 2, 4)),
        "Epoch[1] Validation-accuracy=0.250000",
    ]
    assert metric.resets == 3


def test_the_progress_bar_moves_on_a_terminal_and_is_a_few_lines_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    run_epochs(callbacks.ProgressBar(total=200, length=10), 200)
    assert len(caplog.records) == 11
    assert caplog.records[-1].message == "[==========] 100%"

    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    run_epochs(callbacks.ProgressBar(total=4, length=4, stream=terminal), 4)
    assert terminal.getvalue() == "\r[=---] 25%\r[==--] 50%\r[===-] 75%\r[====] 100%"


def test_other_ranks_log_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("RANK", "1")
    for callback in (
        callbacks.Speedometer(batch_size=1, frequent=1),
        callbacks.ProgressBar(total=3),
        callbacks.log_train_metric(1),
        callbacks.LogValidationMetrics(),
    ):
        run_epochs(callback, 3, {"loss": 1.0})
    callbacks.ByteSpeedometer("merge", total_bytes=1)(1)
    assert caplog.records == []


def test_the_speed_of_a_conversion_is_logged_by_the_same_kind_of_callback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from ckptflow.convert import convert
    from ckptflow.request import ConvertRequest

    caplog.set_level("INFO")
    request = ConvertRequest(path=write_fsdp_step(tmp_path / "run", 10), out=tmp_path / "out")
    convert(request, lambda plan: callbacks.ByteSpeedometer("merge", plan.plan.nbytes))
    (line,) = [record.message for record in caplog.records if record.name == "ckptflow.callbacks.reporting"]
    assert line.startswith("merge: 54.72 kB of 54.72 kB, ")
    assert line.endswith("0 s left")
