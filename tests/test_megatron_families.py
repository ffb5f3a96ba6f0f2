"""The names and shapes that come out of a Megatron checkpoint are those that transformers' own models have."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from safetensors import safe_open

from ckptflow.transforms.megatron_names import describe
from megatron_models import CONFIGS, VOCAB, config_of

NATIVE = {"kimi_k2": "deepseek_v3"}
"""Kimi K2's config names code of its own on the Hub, which is that of DeepSeek-V3."""


@pytest.mark.parametrize("family", CONFIGS)
def test_a_family_has_what_transformers_saves(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    kind = config["model_type"]
    fields = {key: value for key, value in config.items() if key != "model_type"}
    theirs = transformers.AutoConfig.for_model(NATIVE.get(kind, kind), **fields)
    transformers.AutoModelForCausalLM.from_config(theirs).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    model = describe(config, None if config["tie_word_embeddings"] else VOCAB)
    assert {name for wanted in model.wanted for name in wanted.hf} == set(saved)
    whole = {wanted.hf[0]: list(wanted.shape) for wanted in model.wanted if len(wanted.hf) == 1}
    assert whole == {name: saved[name] for name in whole}
