"""A model directory passes when it is whole; each single thing that is wrong with one is found and named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptflow.convert import convert
from ckptflow.errors import NotACheckpointError, VerificationError
from ckptflow.request import ConvertRequest
from ckptflow.validate.verify import verify
from validation import CONFIG, check_named, edit_json, flip_bit, llama_weights, write_model

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
BART = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A model of two files without a config: nothing here needs transformers."""
    return write_model(tmp_path / "out", llama_weights(), config=None, files=2)


def failures(out: Path) -> dict[str, str]:
    return {check.name: check.detail for check in verify(out).failures}


def test_a_whole_directory_passes(plain: Path) -> None:
    report = verify(plain)
    assert report.passed
    assert {c.name for c in report.checks if c.status == "passed"} >= {
        "weight files and index",
        "sha256 of files",
        "record of tensors",
        "checksums of tensors",
        "finite values",
        "zeros",
    }
    assert report.bytes_by_dtype == {"bfloat16": sum(t.nbytes for t in llama_weights().values())}
    json.dumps(report.to_json())


def test_one_flipped_bit_is_found_and_its_tensor_named(plain: Path) -> None:
    flip_bit(plain / "model-00002-of-00002.safetensors", -1)
    found = failures(plain)
    assert "model-00002-of-00002.safetensors" in found["sha256 of files"]
    assert len(found["checksums of tensors"].split(",")) == 1
    assert found["checksums of tensors"].split(": ")[1] in llama_weights()


def test_the_error_of_a_report_lists_the_failed_checks(plain: Path) -> None:
    flip_bit(plain / "model-00001-of-00002.safetensors", -1)
    with pytest.raises(VerificationError, match=r"sha256 of files(.|\n)*checksums of tensors"):
        verify(plain).raise_if_failed()


def test_an_extra_weight_file_is_named(plain: Path) -> None:
    save_file({"stray": torch.ones(2)}, plain / "model-00003-of-00003.safetensors")
    found = failures(plain)
    assert "model-00003-of-00003.safetensors is not named" in found["weight files and index"]
    assert "model-00003-of-00003.safetensors is not listed" in found["sha256 of files"]
    assert "stray" in found["record of tensors"]


def test_a_stale_torch_file_beside_the_weights_is_named(plain: Path) -> None:
    torch.save({}, plain / "pytorch_model.bin")
    assert "pytorch_model.bin" in failures(plain)["weight files and index"]


def test_a_missing_weight_file_is_named(plain: Path) -> None:
    (plain / "model-00001-of-00002.safetensors").unlink()
    found = failures(plain)
    assert "names model-00001-of-00002.safetensors, which is not there" in found["weight files and index"]
    assert "model-00001-of-00002.safetensors is missing" in found["sha256 of files"]


def test_a_tensor_that_the_index_forgets_is_named(plain: Path) -> None:
    index = plain / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    del weight_map["model.norm.weight"]
    edit_json(index, weight_map=weight_map)
    assert "does not name model.norm.weight" in failures(plain)["weight files and index"]


def test_a_tensor_that_the_index_puts_elsewhere_is_named(plain: Path) -> None:
    index = plain / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["model.norm.weight"] = "model-00001-of-00002.safetensors"
    edit_json(index, weight_map=weight_map)
    assert "another file for model.norm.weight" in failures(plain)["weight files and index"]


def test_a_wrong_total_size_is_told(plain: Path) -> None:
    edit_json(plain / "model.safetensors.index.json", metadata={"total_size": 1})
    assert "total_size says 1 bytes" in failures(plain)["weight files and index"]


def test_an_index_left_over_beside_a_single_file_is_found(tmp_path: Path) -> None:
    out = write_model(tmp_path / "out", llama_weights(), config=None)
    weight_map = dict.fromkeys(llama_weights(), "model-00001-of-00001.safetensors")
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert "which is not there" in failures(out)["weight files and index"]


def test_several_files_without_an_index_are_refused(plain: Path) -> None:
    (plain / "model.safetensors.index.json").unlink()
    assert "2 weight files and no index" in failures(plain)["weight files and index"]


def test_one_tensor_in_two_files_is_named(plain: Path) -> None:
    save_file({"model.norm.weight": torch.ones(16)}, plain / "model-00003-of-00003.safetensors")
    assert "model.norm.weight is in" in failures(plain)["weight files and index"]


def test_a_truncated_weight_file_is_named(plain: Path) -> None:
    path = plain / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-2])
    assert str(path) in failures(plain)["readable files"]


def test_nan_is_found_and_its_tensor_named(tmp_path: Path) -> None:
    weights = llama_weights()
    weights["model.norm.weight"][3] = float("nan")
    weights["lm_head.weight"][0, 0] = float("inf")
    out = write_model(tmp_path / "out", weights, config=None)
    assert failures(out)["finite values"] == "NaN or Inf in lm_head.weight (1), model.norm.weight (1)"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2])
def test_every_float_dtype_is_searched_for_nan(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.linspace(-60000.0, 60000.0, 100)
    values[7] = float("nan")
    out = write_model(tmp_path / "out", {"w": values.to(dtype), "i": torch.arange(-5, 5)}, config=None)
    assert failures(out) == {"finite values": "NaN or Inf in w (1)"}


def test_nan_that_was_asked_for_is_a_warning(tmp_path: Path) -> None:
    out = write_model(tmp_path / "out", {"w": torch.tensor([float("nan")])}, config=None)
    edit_json(out / "ckptflow.json", recipe={"allow_nonfinite": True})
    report = verify(out)
    assert report.passed
    assert check_named(report, "finite values").status == "warning"


def test_a_zero_filled_tail_is_found(tmp_path: Path) -> None:
    weights = {"a": torch.ones(64, 64), "b": torch.ones(64, 64)}
    out = write_model(tmp_path / "out", weights, config=None)
    path = out / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8192] + bytes(8192))
    report = verify(out)
    assert check_named(report, "checksums of tensors").detail == "not what was written: b"
    assert "model.safetensors ends in 8192 zero bytes, in b" in check_named(report, "zeros").detail


def test_a_matrix_of_zeros_is_a_warning(tmp_path: Path) -> None:
    out = write_model(tmp_path / "out", {"a": torch.zeros(4, 4), "b": torch.ones(4), "c": torch.zeros(4)}, config=None)
    report = verify(out)
    assert report.passed
    assert check_named(report, "zeros").detail == "all zero: a"


def test_a_tensor_under_another_name_is_found(tmp_path: Path) -> None:
    weights = llama_weights()
    out = write_model(tmp_path / "out", weights, config=None)
    first, second = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    weights[first], weights[second] = weights[second], weights[first]
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    assert failures(out)["checksums of tensors"] == f"not what was written: {first}, {second}"


def test_a_dtype_that_the_config_does_not_say_fails(tmp_path: Path) -> None:
    out = write_model(tmp_path / "out", llama_weights(torch.float32), {"dtype": "bfloat16", "model_type": "unknown-x"})
    assert "not bfloat16, and no reason is recorded" in failures(out)["dtypes"]


def test_a_model_that_transformers_does_not_know_is_skipped_with_the_reason(tmp_path: Path) -> None:
    config = {"model_type": "mine", "auto_map": {"AutoModel": "modeling_mine.Mine"}, "dtype": "bfloat16"}
    report = verify(write_model(tmp_path / "out", llama_weights(), config))
    assert report.passed
    check = check_named(report, "keys and shapes")
    assert check.status == "skipped"
    assert "needs remote code" in check.detail


def test_a_token_without_a_row_is_a_warning(tmp_path: Path) -> None:
    out = write_model(tmp_path / "out", llama_weights(), config=None)
    tokenizer = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 64, "content": "<x>"}]}
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    check = check_named(verify(out), "tokenizer")
    assert (check.status, check.figures["highest id"]) == ("warning", 64)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError):
        verify(tmp_path)


class TestAgainstTheConfig:
    """One process with transformers for each: few, because each takes seconds."""

    def test_a_whole_model_passes(self, tmp_path: Path) -> None:
        report = verify(write_model(tmp_path / "out", llama_weights(), files=2))
        assert report.passed, report.failures
        check = check_named(report, "keys and shapes")
        assert (check.status, check.figures["architecture"]) == ("passed", "LlamaForCausalLM")

    @pytest.mark.parametrize(
        ("model", "config", "fields"),
        [
            ("BartForConditionalGeneration", "BartConfig", BART),
            ("BartForSequenceClassification", "BartConfig", BART),
            ("LlamaForSequenceClassification", "LlamaConfig", {"pad_token_id": 0}),
            ("CLIPVisionModel", "CLIPVisionConfig", {"image_size": 8, "patch_size": 4}),
        ],
    )
    def test_a_config_that_names_no_architecture_is_that_of_the_model_that_fits(
        self, tmp_path: Path, model: str, config: str, fields: dict[str, int]
    ) -> None:
        import transformers

        sizes = {key: CONFIG[key] for key in SIZES if not fields.get("d_model")}
        made = getattr(transformers, model)(getattr(transformers, config)(**sizes, **fields))
        made.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        del saved["architectures"]
        (tmp_path / "config.json").write_text(json.dumps(saved))
        report = verify(tmp_path, forward=True)
        assert report.passed, report.failures
        assert check_named(report, "keys and shapes").figures["architecture"] == model

    def test_the_head_of_a_model_without_an_architecture_is_missed(self, tmp_path: Path) -> None:
        config = {k: v for k, v in CONFIG.items() if k != "architectures"}
        weights = llama_weights()
        del weights["lm_head.weight"]
        assert "missing: lm_head.weight" in failures(write_model(tmp_path / "out", weights, config))["keys and shapes"]

    def test_missing_extra_and_misshapen_tensors_are_named(self, tmp_path: Path) -> None:
        weights = llama_weights()
        del weights["model.norm.weight"]
        weights["base_model.model.lm_head.weight"] = torch.ones(2, 2, dtype=torch.bfloat16)
        weights["model.layers.1.mlp.up_proj.weight"] = torch.ones(25, 16, dtype=torch.bfloat16)
        found = failures(write_model(tmp_path / "out", weights))["keys and shapes"]
        assert "missing: model.norm.weight" in found
        assert "unexpected: base_model.model.lm_head.weight" in found
        assert "model.layers.1.mlp.up_proj.weight has shape [25, 16], the config says [24, 16]" in found

    def test_a_model_whose_embedding_was_resized_needs_its_own_config(self, tmp_path: Path) -> None:
        weights = {fqn: torch.cat([t, t[:2]]) if t.shape[0] == 64 else t for fqn, t in llama_weights().items()}
        with pytest.raises(VerificationError, match=r"config says \[64, 16\](.|\n)*config\.json of this very model"):
            verify(write_model(tmp_path / "out", weights)).raise_if_failed()

    def test_a_head_left_out_though_the_config_ties_nothing_is_missing(self, tmp_path: Path) -> None:
        weights = llama_weights()
        del weights["lm_head.weight"]
        assert "missing: lm_head.weight" in failures(write_model(tmp_path / "out", weights))["keys and shapes"]

    def test_a_tied_head_may_be_absent_or_equal_but_not_different(self, tmp_path: Path) -> None:
        tied = {**CONFIG, "tie_word_embeddings": True}
        weights = llama_weights(config=tied)
        assert verify(write_model(tmp_path / "absent", weights, tied)).passed
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        assert verify(write_model(tmp_path / "equal", weights, tied)).passed
        weights["lm_head.weight"][0, 0] += 1
        found = failures(write_model(tmp_path / "different", weights, tied))
        assert "lm_head.weight to model.embed_tokens.weight, but they differ" in found["tied weights"]

    def test_trl_value_head_is_allowed_and_noted(self, tmp_path: Path) -> None:
        weights = llama_weights()
        weights["v_head.summary.weight"] = torch.ones(1, 16, dtype=torch.bfloat16)
        report = verify(write_model(tmp_path / "out", weights))
        assert report.passed
        assert "v_head.summary.weight: trl's value head" in check_named(report, "keys and shapes").detail

    def test_an_expert_too_many_is_not_stacked_in_place_of_a_missing_one(self, tmp_path: Path) -> None:
        config = {**CONFIG, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
        weights = {n: t for n, t in llama_weights().items() if ".mlp." not in n}
        for layer in range(2):
            at = f"model.layers.{layer}.block_sparse_moe"
            weights[f"{at}.gate.weight"] = torch.ones(4, 16, dtype=torch.bfloat16)
            for expert in (0, 1, 2, 4 if layer else 3):
                for name, shape in {"w1": (24, 16), "w2": (16, 24), "w3": (24, 16)}.items():
                    weights[f"{at}.experts.{expert}.{name}.weight"] = torch.ones(shape, dtype=torch.bfloat16)
        found = failures(write_model(tmp_path / "out", weights, config))["keys and shapes"]
        assert "unexpected: model.layers.1.block_sparse_moe.experts.4.w1.weight" in found


def test_a_router_that_was_rounded_though_it_computes_in_float32_is_told(fixtures_dir: Path, tmp_path: Path) -> None:
    checkpoint = fixtures_dir / "fsdp2_w2_deepseekv3_buffer" / "input" / "global_step_10" / "actor"
    router = "model.layers.1.mlp.gate.weight"
    convert(ConvertRequest(path=checkpoint, out=tmp_path / "rounded"))
    told = check_named(verify(tmp_path / "rounded"), "dtypes")
    assert told.status == "passed"
    assert f"rounded, though transformers computes with them in float32: {router} (--keep-dtype" in told.detail
    convert(ConvertRequest(path=checkpoint, out=tmp_path / "kept", keep_dtype=("*.gate.weight",)))
    assert "rounded" not in check_named(verify(tmp_path / "kept"), "dtypes").detail


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"files": 3}', '{"files": {"config.json": "x"}}', '{"tensors": {"a": 1}}', '{"recipe": []}'],
)
def test_a_record_that_is_none_is_damage_and_not_absence(plain: Path, content: str) -> None:
    (plain / "ckptflow.json").write_text(content)
    assert "ckptflow.json is no record of ckptflow" in failures(plain)["readable files"]
