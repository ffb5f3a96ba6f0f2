"""Quantized models: what scales their numbers is never rounded, nor summed with an adapter, and the config agrees."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ckptflow.convert import convert
from ckptflow.dtypes import dtype_named
from ckptflow.errors import UnsupportedCheckpointError
from ckptflow.plan import ConsolidationPlan, PlannedTensor
from ckptflow.request import ConvertRequest
from ckptflow.tensors import SourceFile, whole
from ckptflow.transforms.cast import cast
from ckptflow.validate.verify import verify
from validation import CONFIG, check_named, llama_weights

Header = tuple[str, tuple[int, ...]]

# What each method stores in the files of one linear layer, and what beside it. Sources: the quantizers of transformers,
# compressed-tensors' and bitsandbytes' state dicts, DeepSeek-V3's and gpt-oss's files.
METHODS: dict[str, dict[str, Header]] = {
    "fp8 in blocks": {"up.weight": ("float8_e4m3fn", (8, 8)), "up.weight_scale_inv": ("float32", (1, 1))},
    "fp8 with scales of activations and cache": {
        "attn.k.weight": ("float8_e4m3fn", (8, 8)),
        "attn.k.weight_scale": ("float32", (8, 1)),
        "attn.k.input_scale": ("float32", (1,)),
        "attn.k_scale": ("float32", ()),
    },
    "fp8 experts in one tensor": {
        "experts.gate_up_proj": ("float8_e4m3fn", (2, 8, 8)),
        "experts.gate_up_proj_scale_inv": ("float32", (2, 1, 1)),
    },
    "nvfp4": {
        "up.weight": ("uint8", (8, 4)),
        "up.weight_scale": ("float8_e4m3fn", (8, 1)),
        "up.weight_scale_2": ("float32", ()),
    },
    "gptq and awq": {
        "up.qweight": ("int32", (1, 8)),
        "up.qzeros": ("int32", (1, 1)),
        "up.scales": ("float16", (1, 8)),
        "up.g_idx": ("int32", (8,)),
    },
    "compressed-tensors int4": {
        "up.weight_packed": ("int32", (8, 1)),
        "up.weight_scale": ("float16", (8, 1)),
        "up.weight_shape": ("int64", (2,)),
    },
    "bitsandbytes 8 bit": {"up.weight": ("int8", (8, 8)), "up.SCB": ("float32", (8,))},
    "bitsandbytes 4 bit": {
        "up.weight": ("uint8", (32, 1)),
        "up.weight.absmax": ("float32", (2,)),
        "up.weight.quant_map": ("float32", (16,)),
        "up.weight.quant_state.bitsandbytes__nf4": ("uint8", (80,)),
    },
    "bitsandbytes 4 bit in floats, for FSDP": {
        "up.weight": ("float32", (8, 1)),
        "up.weight.absmax": ("float32", (2,)),
        "up.weight.quant_state.bitsandbytes__nf4": ("uint8", (80,)),
    },
}
OTHERS: dict[str, Header] = {
    "norm.weight": ("float32", (8,)),
    "norm.running_mean": ("float32", (8,)),
    "norm.num_batches_tracked": ("int64", ()),
    "embeddings.class_embedding": ("float32", (8,)),
    "embeddings.position_ids": ("int64", (1, 8)),
    "attn.proj.weight": ("float32", (8, 8)),
    "gpt2.attn.bias": ("uint8", (1, 1, 8, 8)),
    "gpt2.attn.masked_bias": ("float32", (2,)),
}


def cast_to_bfloat16(headers: Mapping[str, Header]) -> dict[str, PlannedTensor]:
    file = SourceFile(path="weights", nbytes=1 << 20, mtime_ns=0)
    tensors = []
    for fqn, (dtype, shape) in headers.items():
        source = whole(file, 0, shape, dtype_named(dtype))
        tensors.append(PlannedTensor(fqn=fqn, source=source, dtype=source.dtype, source_fqns=(fqn,)))
    return {tensor.fqn: tensor for tensor in cast(ConsolidationPlan(tensors=tuple(tensors)), "bfloat16").tensors}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_tensors_of_a_quantized_layer_keep_their_dtypes_and_all_others_are_cast(method: dict[str, Header]) -> None:
    found = cast_to_bfloat16({**method, **OTHERS})
    for fqn, (dtype, _) in method.items():
        assert (found[fqn].dtype.name, bool(found[fqn].kept_reason)) == (dtype, True)
    for fqn, (dtype, _) in OTHERS.items():
        assert found[fqn].dtype.name == ("bfloat16" if dtype == "float32" else dtype)


def test_integers_of_other_kinds_make_no_module_quantized() -> None:
    single = {"logit_scale": ("float32", ())}
    assert all(t.dtype.name != "float32" for t in cast_to_bfloat16({**OTHERS, **single}).values())


FP8_CONFIG = {**CONFIG, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 32}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def write(directory: Path, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
    directory.mkdir(parents=True)
    save_file(dict(weights), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    """A Llama whose linear layers are float8 with one float32 scale each, as DeepSeek-V3 stores its own."""
    weights: dict[str, torch.Tensor] = {}
    for fqn, value in llama_weights(torch.float32, FP8_CONFIG).items():
        if "_proj" in fqn:
            scale = value.abs().max() / 448
            weights[fqn] = (value / scale).to(torch.float8_e4m3fn)
            weights[f"{fqn}_scale_inv"] = scale.expand(-(-value.shape[0] // 128), -(-value.shape[1] // 128)).clone()
        else:
            weights[fqn] = value
    return write(tmp_path / "checkpoint-3", weights, {**FP8_CONFIG, "quantization_config": FP8})


def test_an_fp8_model_computes_what_it_did(fp8: Path, tmp_path: Path) -> None:
    convert(ConvertRequest(path=fp8, out=tmp_path / "out"))
    before, after = (AutoModelForCausalLM.from_pretrained(d, dtype="bfloat16") for d in (fp8, tmp_path / "out"))
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        assert torch.equal(old, new), name
    report = verify(tmp_path / "out", against=fp8, forward=True)
    assert report.passed
    assert check_named(report, "forward pass").status == "passed"


def test_an_adapter_is_not_folded_into_a_quantized_base(fp8: Path, tmp_path: Path) -> None:
    prefix = "base_model.model.model.layers.0.self_attn.o_proj"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    matrices = {f"{prefix}.lora_A.weight": torch.ones(2, 128), f"{prefix}.lora_B.weight": torch.ones(128, 2)}
    save_file(matrices, adapter / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps({**facts, "base_model_name_or_path": str(fp8)}))
    with pytest.raises(UnsupportedCheckpointError, match="base weight is quantized") as caught:
        convert(ConvertRequest(path=adapter, out=tmp_path / "out", base_model=fp8))
    assert "model.layers.0.self_attn.o_proj" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("nested", [False, True])
def test_the_config_of_a_model_that_was_dequantized_does_not_call_it_quantized(tmp_path: Path, nested: bool) -> None:
    config = {"text_config": {"quantization_config": FP8}} if nested else {"quantization_config": FP8}
    model = write(tmp_path / "checkpoint-3", llama_weights(torch.float32), {**CONFIG, **config})
    record = convert(ConvertRequest(path=model, out=tmp_path / "out"))
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    assert any("quantization_config (fp8) is left out" in note for note in record["notes"])


def test_a_method_that_rounds_floats_as_the_model_runs_stays_in_the_config(tmp_path: Path) -> None:
    bitnet = {"quant_method": "bitnet", "quantization_mode": "online", "linear_class": "autobitlinear"}
    config = {**CONFIG, "quantization_config": bitnet}
    model = write(tmp_path / "checkpoint-3", llama_weights(torch.float32), config)
    record = convert(ConvertRequest(path=model, out=tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == bitnet
    assert any("it is carried over" in note for note in record["notes"])


def test_quantized_tensors_without_a_config_that_says_so_are_told(fp8: Path, tmp_path: Path) -> None:
    (fp8 / "config.json").write_text(json.dumps(FP8_CONFIG))
    record = convert(ConvertRequest(path=fp8, out=tmp_path / "out"))
    assert any("7 modules are quantized, and config.json has no quantization_config" in n for n in record["notes"])


@pytest.mark.skipif(importlib.util.find_spec("optimum") is not None, reason="optimum, which loads GPTQ, is here")
def test_a_method_that_this_machine_can_not_load_is_not_called_a_fault_of_the_model(tmp_path: Path) -> None:
    weights = llama_weights(torch.float16)
    for fqn in [fqn for fqn in weights if "_proj" in fqn]:
        rows, columns = weights.pop(fqn).shape
        module = re.sub(r"\.weight$", "", fqn)
        weights[f"{module}.qweight"] = torch.ones(columns // 8, rows, dtype=torch.int32)
        weights[f"{module}.qzeros"] = torch.ones(1, rows // 8, dtype=torch.int32)
        weights[f"{module}.scales"] = torch.full((1, rows), 0.1, dtype=torch.float16)
        weights[f"{module}.g_idx"] = torch.zeros(columns, dtype=torch.int32)
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False, "sym": True}
    model = write(tmp_path / "checkpoint-3", weights, {**CONFIG, "quantization_config": gptq})
    convert(ConvertRequest(path=model, out=tmp_path / "out"))
    scales = {fqn: t for fqn, t in load_file(tmp_path / "out" / "model.safetensors").items() if "scales" in fqn}
    assert scales
    assert all(torch.equal(value, weights[fqn]) for fqn, value in scales.items())
    report = verify(tmp_path / "out", forward=True)
    assert report.passed
    for name in ("keys and shapes", "forward pass"):
        assert check_named(report, name).status == "skipped"
        assert "optimum" in check_named(report, name).detail
