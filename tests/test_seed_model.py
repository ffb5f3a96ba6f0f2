"""seed-model: fresh weights as transformers makes them, the same bytes for the same seed, ready for training."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from checkpoints import TINY, WORDS, write_model_directory
from ckptflow.errors import OutputError, UnsupportedCheckpointError, UsageError
from ckptflow.seeding import describe, describing, drawing, fills, recording
from ckptflow.seeding.describe import fresh_model
from ckptflow.seeding.recipes import parse_init_std, std_of
from ckptflow.seeding.request import SeedRequest
from ckptflow.seeding.seed import seed_model
from ckptflow.validate.verify import verify
from validation import check_named

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.05,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
GPT2: dict[str, Any] = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
STATE: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
# What each family does that the others don't: biases, norms on heads, experts that are stacked in memory, a head that
# is tied, residual outputs that are scaled, norms that are centred on zero, a bias of the router that is a buffer in
# fp32, a row for padding, decays that are computed.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "llama-padding": {**SMALL, "pad_token_id": 5},
    "qwen2": {**SMALL, "tie_word_embeddings": True},
    "qwen3": SMALL,
    "mixtral": {**SMALL, **MOE},
    "gpt2": GPT2,
    "gemma": SMALL,
    "gemma2": SMALL,
    "deepseek_v3": {**SMALL, **LATENT, "num_key_value_heads": 4},
    "mamba": STATE,
    "roformer": {**SMALL, "embedding_size": 32, "is_decoder": True},
}


@pytest.fixture(autouse=True)
def _without_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers is loaded here already; the tests of the command line start the real process."""

    def ask(config_dir: Path, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            answer = describing.describe(config_dir, question["init_std"], question["seed"])
        except describing.RefusedError as error:
            answer = {"refused": str(error)}
        parsed: dict[str, Any] = json.loads(json.dumps(answer))
        return parsed

    monkeypatch.setattr(describe, "_ask", ask)


def config_of(family: str) -> transformers.PreTrainedConfig:
    model_type = family.partition("-")[0]
    known: Any = transformers.CONFIG_MAPPING
    config: transformers.PreTrainedConfig = known[model_type](**FAMILIES[family])
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    return config


def write_config(family: str, directory: Path) -> Path:
    config_of(family).save_pretrained(directory)
    return directory


def made_by_transformers(family: str, directory: Path) -> dict[str, torch.Tensor]:
    """What transformers itself saves after it has made a new model."""
    torch.manual_seed(11)
    transformers.AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32).save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def seed(config: Path | str, out: Path, **options: Any) -> dict[str, Any]:
    return seed_model(SeedRequest(config=str(config), out=out, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_distributed_as_those_of_transformers(family: str, tmp_path: Path) -> None:
    wanted = made_by_transformers(family, tmp_path / "theirs")
    seed(write_config(family, tmp_path / "config"), tmp_path / "ours", dtype="float32")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert set(ours) == set(wanted)
    for fqn, theirs in wanted.items():
        mine = ours[fqn]
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), fqn
        assert is_alike(mine, theirs), f"{fqn}: {mine.mean()}±{mine.std()} and {theirs.mean()}±{theirs.std()}"


def is_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal where values are fixed; elsewhere mean and spread as near as two samples of that size are.

    Rows that are zero are the same ones in both.
    """
    if torch.equal(a, b):
        return True
    count, spread = a.numel(), float(b.std())
    rows = a.flatten(1) if a.dim() > 1 else a[:, None]
    others = b.flatten(1) if b.dim() > 1 else b[:, None]
    zero_rows_agree = torch.equal((rows == 0).all(1), (others == 0).all(1))
    six_errors = 6 * spread * math.sqrt(2 / count)
    means_agree = abs(float(a.mean() - b.mean())) < six_errors
    return zero_rows_agree and means_agree and abs(float(a.std()) - spread) < six_errors and not torch.equal(a, b * 0)


def test_verification_finds_nothing_wrong_and_the_model_runs(tmp_path: Path) -> None:
    seed(write_config("deepseek_v3", tmp_path / "config"), tmp_path / "out")
    report = verify(tmp_path / "out", forward=True)
    assert {check.name: check.detail for check in report.checks if check.status == "failed"} == {}
    assert check_named(report, "forward pass").status == "passed"


def test_the_bias_of_a_router_stays_in_fp32_and_says_why(tmp_path: Path) -> None:
    record = seed(write_config("deepseek_v3", tmp_path / "config"), tmp_path / "out")
    biases = {fqn: entry for fqn, entry in record["tensors"].items() if fqn.endswith("e_score_correction_bias")}
    assert biases
    assert all(entry["dtype"] == "float32" and "router" in entry["kept_reason"] for entry in biases.values())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("config") / "llama"
    write_model_directory(directory, {**TINY, "hidden_size": 64, "intermediate_size": 1600, "vocab_size": 2048})
    return directory


def weight_bytes(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.safetensors"))}


def test_threads_and_memory_change_no_byte(llama: Path, tmp_path: Path) -> None:
    seed(llama, tmp_path / "one", threads=1, memory_budget_bytes=300_000, seed=3)
    seed(llama, tmp_path / "four", threads=4, seed=3)
    assert weight_bytes(tmp_path / "one") == weight_bytes(tmp_path / "four")


def test_the_cut_into_files_changes_no_value(llama: Path, tmp_path: Path) -> None:
    seed(llama, tmp_path / "one")
    seed(llama, tmp_path / "many", max_shard_bytes=500_000)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    cut = {fqn: tensor for file in files for fqn, tensor in load_file(file).items()}
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert set(cut) == set(whole)
    assert all(torch.equal(cut[fqn], whole[fqn]) for fqn in whole)


def test_another_seed_gives_other_weights_and_a_dtype_only_rounds_them(llama: Path, tmp_path: Path) -> None:
    for name, options in {
        "fp32": {"dtype": "float32"},
        "bf16": {"dtype": "bfloat16"},
        "fp16": {"dtype": "float16"},
        "other": {"dtype": "float32", "seed": 1},
    }.items():
        seed(llama, tmp_path / name, **options)
    found = {path.name: load_file(path / "model.safetensors") for path in tmp_path.iterdir() if path.is_dir()}
    for fqn, tensor in found["fp32"].items():
        assert torch.equal(found["bf16"][fqn], tensor.bfloat16())
        assert torch.equal(found["fp16"][fqn], tensor.half())
    head = "lm_head.weight"
    assert not torch.equal(found["fp32"][head], found["other"][head])
    assert json.loads((tmp_path / "fp16" / "config.json").read_text())["dtype"] == "float16"


def test_no_two_tensors_and_no_two_blocks_share_their_values(llama: Path, tmp_path: Path) -> None:
    seed(llama, tmp_path / "out", dtype="float32")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    first, second = (tensors[f"model.layers.{n}.mlp.up_proj.weight"].flatten() for n in (0, 1))
    assert first.numel() > drawing.BLOCK
    overlap = min(1000, first.numel() - drawing.BLOCK)
    assert not torch.equal(first[:overlap], second[:overlap])
    assert not torch.equal(first[:overlap], first[drawing.BLOCK : drawing.BLOCK + overlap])


@pytest.mark.parametrize(
    ("init_std", "wanted"),
    [("small-init", math.sqrt(2 / (5 * 64))), ("mt-nlg-530b", math.sqrt(1 / (3 * 64))), (0.5, 0.5)],
)
def test_a_named_deviation_holds_for_all_matrices(
    init_std: str | float, wanted: float, llama: Path, tmp_path: Path
) -> None:
    record = seed(llama, tmp_path / "out", init_std=init_std, dtype="float32")
    assert record["recipe"]["std"] == pytest.approx(wanted)
    for fqn, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        if "norm" in fqn:
            assert torch.equal(tensor, torch.ones_like(tensor))
        else:
            assert float(tensor.std()) == pytest.approx(wanted, rel=0.1)
            assert abs(float(tensor.mean())) < wanted / 5


def test_residual_outputs_are_scaled_by_the_models_own_rule_only(tmp_path: Path) -> None:
    config = write_config("gpt2", tmp_path / "config")
    spread = {}
    for name in ("default", "small-init"):
        seed(config, tmp_path / name, init_std=name, dtype="float32")
        weights = load_file(tmp_path / name / "model.safetensors")
        spread[name] = float(weights["transformer.h.0.mlp.c_proj.weight"].std())
    assert spread["default"] == pytest.approx(0.02 / math.sqrt(2 * 2), rel=0.1)
    assert spread["small-init"] == pytest.approx(std_of("small-init", 64), rel=0.1)


def test_formulas_give_the_numbers_of_their_papers() -> None:
    assert std_of("mt-nlg-530b", 20480) == pytest.approx(0.00403, abs=1e-5)
    assert std_of("small-init", 512) == pytest.approx(math.sqrt(2 / (512 + 4 * 512)))


@pytest.mark.parametrize("text", ["tiny-init", "0", "-1", "nan", "inf", ""])
def test_what_is_no_deviation_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="standard deviation"):
        parse_init_std(text)


def test_a_truncated_normal_stays_within_its_bounds_and_keeps_its_shape() -> None:
    kind = fills.TruncatedNormal(mean=0.0, std=1.0, low=-1.0, high=2.0)
    fill = fills.Fill(start=0, stop=200_000, kind=kind)
    tensor = fills.FreshTensor(fqn="w", shape=(200_000,), dtype="float32", is_buffer=False, fills=(fill,))
    values, part = np.empty(200_000, np.float32), np.empty(1000, np.float32)
    drawing.Drawer(tensor, 0).fill(values, 0)
    drawing.Drawer(tensor, 0).fill(part, 150_000)
    assert -1 <= values.min() < -0.98
    assert 1.96 < values.max() <= 2
    assert np.array_equal(values[150_000:151_000], part)
    assert values.mean() == pytest.approx(0.2296, abs=0.01)  # (φ(-1) - φ(2)) / (Φ(2) - Φ(-1))


def test_a_model_whose_rule_is_not_understood_is_refused_by_name(tmp_path: Path) -> None:
    config = transformers.RwkvConfig(vocab_size=96, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2)
    config.architectures = ["RwkvForCausalLM"]  # orthogonal embeddings
    config.save_pretrained(tmp_path / "config")
    with pytest.raises(UnsupportedCheckpointError, match=r"rwkv\.\S+\.weight") as caught:
        fresh_model(tmp_path / "config", "default", 0)
    assert "is not known" in str(caught.value)


def test_a_model_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoModel": "mine.Mine"}}))
    (tmp_path / "mine.py").write_text("raise SystemExit('never run')")
    with pytest.raises(UnsupportedCheckpointError) as caught:
        seed(tmp_path, tmp_path / "out")
    assert "needs remote code, which is never run" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_deviation_for_a_model_without_such_a_setting_is_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    config.architectures = ["T5ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedCheckpointError) as caught:
        fresh_model(tmp_path, 0.01, 0)
    assert "initializer_range" in str(caught.value)


def test_settings_of_quantization_are_left_out_and_said_to_be(tmp_path: Path) -> None:
    config = {**TINY, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    write_model_directory(tmp_path / "config", config)
    record = seed(tmp_path / "config", tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert any("quantization_config" in note for note in record["notes"])
    assert not any(fqn.endswith("scale_inv") for fqn in record["tensors"])


def test_a_config_file_alone_is_enough_and_the_missing_tokenizer_is_said(tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps({**TINY, "architectures": None}))
    record = seed(tmp_path / "tiny.json", tmp_path / "out")
    assert any("tokenizer" in note for note in record["notes"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_name_that_is_neither_here_nor_on_the_hub_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="Hub"):
        seed("nobody/nothing-of-that-name", tmp_path / "out")
    with pytest.raises(UsageError, match="no such config"):
        seed("./not/here", tmp_path / "out")


def test_a_second_run_leaves_what_is_there_and_other_options_need_overwrite(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = seed(llama, out)
    written = (out / "model.safetensors").stat().st_mtime_ns
    assert seed(llama, out) == first
    assert (out / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(OutputError, match="something else"):
        seed(llama, out, seed=1)
    assert seed(llama, out, seed=1, overwrite=True)["recipe"]["seed"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ckptflow.cli", "seed-model", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
    )


def test_the_command_tells_what_it_made_and_refuses_with_the_right_status(llama: Path, tmp_path: Path) -> None:
    # docs/seed-model.md shows this command.
    done = run_command(str(llama), str(tmp_path / "out"), "--init-std", "small-init", "--seed", "17", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["recipe"]["seed"], record["recipe"]["init_std"]) == (17, "small-init")
    again = run_command(str(llama), str(tmp_path / "out"), "--seed", "18")
    assert again.returncode == 1
    assert "--overwrite" in again.stderr
    assert run_command(str(llama), str(tmp_path / "new"), "--init-std", "tiny").returncode == 2
    assert not (tmp_path / "new").exists()


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """The peak of a process that writes 340 MB of weights is below that of one that would hold a quarter of them."""
    sizes = {"vocab_size": 60_000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
    write_model_directory(tmp_path / "config", {**TINY, **sizes})
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from ckptflow.seeding.request import SeedRequest\n"
        "from ckptflow.seeding.seed import seed_model\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "request = SeedRequest(config=sys.argv[1], out=Path(sys.argv[2]), threads=2, memory_budget_bytes=20_000_000)\n"
        "seed_model(request)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "config"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
    )
    written = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert written > 300e6
    assert int(done.stdout) * 1024 < written / 4


def test_a_fine_tuning_script_trains_from_it_as_from_a_pretrained_model(tmp_path: Path) -> None:
    # docs/seed-model.md shows the lines between the two calls.
    write_model_directory(tmp_path / "config", TINY)
    seed(tmp_path / "config", tmp_path / "fresh", init_std="small-init")
    losses = train(tmp_path / "fresh", tmp_path / "run")
    assert losses[0] == pytest.approx(math.log(TINY["vocab_size"]), rel=0.1)
    assert losses[-1] < losses[0] - 1


def train(model_dir: Path, run_dir: Path) -> list[float]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32")
    text = tokenizer(" ".join(WORDS[3:]), return_tensors="pt")["input_ids"][0]
    examples: list[Mapping[str, torch.Tensor]] = [{"input_ids": text, "labels": text}] * 8
    arguments = transformers.TrainingArguments(
        output_dir=str(run_dir),
        max_steps=20,
        learning_rate=2e-2,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=examples)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_what_is_done_to_parameters_is_told_apart_from_what_only_looks_like_it() -> None:
    with recording.recording() as notes:
        copied, source, halved, halves, gap = (torch.empty(8, 4, device="meta") for _ in range(5))
        source.normal_(0, 0.5)
        copied.copy_(source)
        halved.normal_(1.0, 0.5)
        halved.copy_(halved / 2)
        halves[:4].fill_(1.0)
        halves[4:].uniform_(-1, 1)
        gap[:7].zero_()
    notes.refuse_copies([copied, source, halved, halves, gap])
    assert notes.fills_of(copied) == "it is a copy of another parameter"
    assert notes.fills_of(source)[0].kind == fills.Normal(mean=0.0, std=0.5)  # type: ignore[union-attr]
    assert notes.fills_of(halved)[0].kind == fills.Normal(mean=0.5, std=0.25)  # type: ignore[union-attr]
    assert [(fill.start, fill.stop) for fill in notes.fills_of(halves)] == [(0, 16), (16, 32)]  # type: ignore[union-attr]
    assert notes.fills_of(gap) == "nothing gives it a value"


def test_memory_that_nobody_wrote_to_is_never_taken_for_values() -> None:
    with recording.recording() as notes:
        parameter = torch.empty(4, device="meta")
        scratch = torch.empty(4, device="meta")
        scratch[:2].uniform_(0, 1)
        parameter.copy_(scratch.log())
    assert notes.fills_of(parameter) == "its value comes from aten::copy_"
