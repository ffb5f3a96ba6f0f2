"""The forward pass proves that transformers loads the output and computes with it; it is skipped or ended in time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptflow.validate.forward import available_bytes, check_forward
from ckptflow.validate.report import Check
from validation import CONFIG, llama_weights, write_model

WEIGHT_BYTES = 40_000


def forward(out: Path, budget_bytes: int | None = None, timeout_seconds: float = 240) -> Check:
    return check_forward(out, WEIGHT_BYTES, budget_bytes, timeout_seconds)


def test_a_good_model_gives_finite_logits_that_repeat(tmp_path: Path) -> None:
    check = forward(write_model(tmp_path / "out", llama_weights()))
    assert check.status == "passed", check.detail
    assert float(check.figures["largest logit"]) > 0


def test_a_model_that_overflows_fails(tmp_path: Path) -> None:
    weights = llama_weights(torch.float16)
    weights["model.norm.weight"].fill_(60000)
    check = forward(write_model(tmp_path / "out", weights, {**CONFIG, "dtype": "float16"}))
    assert check.status == "failed"
    assert "logits are NaN or Inf" in check.detail


def test_a_model_with_a_missing_tensor_fails(tmp_path: Path) -> None:
    weights = llama_weights()
    del weights["model.norm.weight"]
    check = forward(write_model(tmp_path / "out", weights))
    assert (check.status, check.detail) == ("failed", "missing: model.norm.weight")


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    check = forward(write_model(tmp_path / "out", llama_weights()), timeout_seconds=0.2)
    assert (check.status, check.detail) == ("failed", "no answer in 0.2 s")


def test_a_model_that_does_not_fit_the_memory_is_skipped(tmp_path: Path) -> None:
    check = check_forward(tmp_path, 10**12, 10**9, 1)
    assert check.status == "skipped"
    assert "1300.7 GB" in check.detail


def test_the_memory_at_hand_is_less_than_all_of_it() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < available_bytes() < total


@pytest.mark.parametrize("kind", ["mine", None])
def test_an_unknown_model_type_is_skipped(tmp_path: Path, kind: str | None) -> None:
    check = forward(write_model(tmp_path / "out", llama_weights(), {**CONFIG, "model_type": kind}))
    assert check.status == "skipped"
    assert "remote code" in check.detail
