"""LoRA on models whose head is tied to the embedding: PEFT's own files, folded to the trained model or refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from ckptflow.conversion import Conversion, plan_conversion
from ckptflow.errors import UnsupportedCheckpointError
from ckptflow.request import ConvertRequest
from reading import folded_values

SIZES = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IDS = torch.arange(10).view(2, 5)


def save(directory: Path, tied: bool, **options: Any) -> PeftModel:
    """Base and adapter side by side; the trained model, which computes as PEFT does."""
    torch.manual_seed(3)
    base = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    if not tied:
        base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
        base.config.tie_word_embeddings = False
    base.save_pretrained(directory / "base")
    base.name_or_path = "base"
    facts = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own, on tied weights
        model = get_peft_model(base, LoraConfig(**{**facts, **options}))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape) * 0.3)
        model.save_pretrained(directory / "adapter")
    return model


def planned(directory: Path) -> Conversion:
    return plan_conversion(
        ConvertRequest(path=directory / "adapter", out=directory / "out", base_model=directory / "base")
    )


ONE_SIDE: dict[str, dict[str, Any]] = {
    "embedding trained": {"modules_to_save": ["embed_tokens"]},
    "embedding adapted": {"target_modules": ["q_proj", "embed_tokens"]},
    "head adapted": {"target_modules": ["q_proj", "lm_head"]},
}


@pytest.mark.parametrize("options", ONE_SIDE.values(), ids=ONE_SIDE)
def test_an_adapter_of_one_of_two_tied_weights_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    save(tmp_path, True, **options)
    with pytest.raises(UnsupportedCheckpointError, match="one of two tied weights"):
        planned(tmp_path)


@pytest.mark.parametrize("options", ONE_SIDE.values(), ids=ONE_SIDE)
def test_with_an_untied_base_it_folds_to_what_was_trained(tmp_path: Path, options: dict[str, Any]) -> None:
    model = save(tmp_path, False, **options)
    tensors = {tensor.fqn: torch.tensor(folded_values(tensor)).float() for tensor in planned(tmp_path).plan.tensors}
    folded = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
    folded.load_state_dict(tensors)
    torch.testing.assert_close(folded(input_ids=IDS).logits, model.eval()(input_ids=IDS).logits)


def test_weights_that_peft_keeps_tied_are_written_once(tmp_path: Path) -> None:
    save(tmp_path, True, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    plan = planned(tmp_path).plan
    assert plan.ties == {HEAD: EMBEDDING}


def test_a_model_without_a_head_has_nothing_to_tie(tmp_path: Path) -> None:
    save(tmp_path, True, modules_to_save=["embed_tokens"], task_type="FEATURE_EXTRACTION")
    assert EMBEDDING in {tensor.fqn for tensor in planned(tmp_path).plan.tensors}
