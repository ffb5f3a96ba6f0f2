"""The demo's training job writes what verl's layout describes, and it learns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckptflow.demo.text import read_paragraphs, split_text, train_tokenizer
from ckptflow.demo.verl_layout import TRACKER

SAVE_STEPS = (1, 2)
RANKS = (0, 1)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on two real ranks, with a checkpoint after each."""
    directory = tmp_path_factory.mktemp("training") / "run"
    steps = [str(step) for step in SAVE_STEPS]
    command = [sys.executable, "-m", "ckptflow.demo.train", str(directory), "--save-steps", *steps]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    assert [message["saved"] for message in messages if "saved" in message] == list(SAVE_STEPS)
    return directory


def files_below(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_each_step_directory_holds_what_verl_writes(run_dir: Path) -> None:
    ranked = {
        f"actor/{kind}_world_size_2_rank_{rank}.pt" for kind in ("model", "optim", "extra_state") for rank in RANKS
    }
    model = {f"actor/huggingface/{name}" for name in ("config.json", "generation_config.json", "tokenizer.json")}
    for step in SAVE_STEPS:
        found = files_below(run_dir / f"global_step_{step}")
        assert found >= ranked | model | {"actor/fsdp_config.json", "data.pt"}
    assert (run_dir / TRACKER).read_text() == "2"
    config = json.loads((run_dir / "global_step_2/actor/fsdp_config.json").read_text())
    assert config == {"FSDP_version": 2, "world_size": 2}


def test_it_has_the_files_of_a_checkpoint_that_verl_wrote(run_dir: Path, fixtures_dir: Path) -> None:
    verl = files_below(fixtures_dir / "fsdp2_w2_qwen3_steps/input/global_step_10")
    # Newer transformers keep the special tokens in tokenizer_config.json alone.
    verl -= {"actor/huggingface/special_tokens_map.json"}
    assert verl - files_below(run_dir / "global_step_2") == set()


def test_the_ranks_hold_halves_of_fp32_master_weights(run_dir: Path) -> None:
    import torch
    from torch.distributed.tensor import DTensor, Shard

    actor = run_dir / "global_step_2/actor"
    shards = [torch.load(actor / f"model_world_size_2_rank_{rank}.pt", weights_only=False) for rank in RANKS]
    assert list(shards[0]) == list(shards[1])
    for fqn, first in shards[0].items():
        second = shards[1][fqn]
        assert isinstance(first, DTensor)
        assert first.dtype == torch.float32
        assert first.device_mesh.mesh_dim_names == ("fsdp",)
        (placement,) = first.placements
        assert isinstance(placement, Shard)
        whole = torch.cat([first._local_tensor, second._local_tensor], dim=placement.dim)
        assert whole.shape == first.shape, fqn


def test_the_rank_files_together_are_the_model_that_config_json_describes(run_dir: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    actor = run_dir / "global_step_1/actor"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(actor / "huggingface"))
    shard = torch.load(actor / "model_world_size_2_rank_1.pt", weights_only=False)
    assert {fqn: tensor.shape for fqn, tensor in shard.items()} == {
        fqn: tensor.shape for fqn, tensor in model.state_dict().items()
    }


def test_training_changes_every_shard_between_checkpoints(run_dir: Path) -> None:
    import torch

    for rank in RANKS:
        name = f"actor/model_world_size_2_rank_{rank}.pt"
        first, second = (torch.load(run_dir / f"global_step_{s}" / name, weights_only=False) for s in SAVE_STEPS)
        unchanged = [fqn for fqn in first if torch.equal(first[fqn]._local_tensor, second[fqn]._local_tensor)]
        assert unchanged == []


def test_the_tokenizer_gives_the_text_back_and_survives_saving(run_dir: Path) -> None:
    from transformers import AutoTokenizer

    training, held_back = split_text()
    fresh = train_tokenizer(training)
    saved = AutoTokenizer.from_pretrained(run_dir / "global_step_1/actor/huggingface")
    ids = fresh.encode(held_back)
    assert fresh.decode(ids) == held_back
    assert saved.encode(held_back) == ids


def test_the_held_back_text_is_not_trained_on() -> None:
    training, held_back = split_text()
    assert len(held_back) > 5_000
    assert training.splitlines() + held_back.splitlines() == read_paragraphs()
