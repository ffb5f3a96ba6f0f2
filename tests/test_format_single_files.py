"""Lightning's .ckpt files and full state dicts, written by torch.save in the trainers' structures."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric import Fabric
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn import Linear
from torch.optim import SGD

from ckptflow.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    InconsistentCheckpointError,
    NotACheckpointError,
    UnsupportedCheckpointError,
)
from ckptflow.formats.base import ReadOptions
from ckptflow.formats.registry import check, locate, read
from ckptflow.manifest import CheckpointManifest
from ckptflow.transforms.prefix import NOT_IN_MODEL, without_wrapper_prefix
from ckptflow.validate.skeleton import describe_model
from reading import read_source

TINY_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 20,
    "tie_word_embeddings": False,
}


def open_at(path: Path, config: Path | None = None) -> CheckpointManifest:
    return read(locate(path), ReadOptions(config_dir=config))


def values(manifest: CheckpointManifest) -> dict[str, bytes]:
    return {name: read_source(source).tobytes() for name, source in manifest.tensors.items()}


def raw(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def llama() -> dict[str, Tensor]:
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (20, 8),
        f"{layer}.self_attn.q_proj.weight": (8, 8),
        f"{layer}.self_attn.k_proj.weight": (4, 8),
        f"{layer}.self_attn.v_proj.weight": (4, 8),
        f"{layer}.self_attn.o_proj.weight": (8, 8),
        f"{layer}.mlp.gate_proj.weight": (12, 8),
        f"{layer}.mlp.up_proj.weight": (12, 8),
        f"{layer}.mlp.down_proj.weight": (8, 12),
        f"{layer}.input_layernorm.weight": (8,),
        f"{layer}.post_attention_layernorm.weight": (8,),
        "model.norm.weight": (8,),
        "lm_head.weight": (20, 8),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def write_lightning(path: Path, state_dict: dict[str, Tensor], step: int = 4) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "epoch": 0,
            "global_step": step,
            "pytorch-lightning_version": "2.6.6",
            "state_dict": state_dict,
            "optimizer_states": [{"state": {0: {"exp_avg": torch.full((500,), torch.nan)}}}],
            "lr_schedulers": [],
            "callbacks": {"ModelCheckpoint{'monitor': None}": {"kth_value": torch.tensor(0.0)}},
        },
        path,
    )


def test_a_lightning_file_is_its_state_dict(tmp_path: Path) -> None:
    weights = {"net.weight": torch.randn(3, 4), "head.bias": torch.randn(3)}
    write_lightning(tmp_path / "epoch=0-step=4.ckpt", weights)
    manifest = open_at(tmp_path / "epoch=0-step=4.ckpt")
    assert values(manifest) == raw(weights)
    assert (manifest.layout, manifest.global_step, manifest.wrapped) == ("lightning", 4, True)
    left_out = {entry.name: entry for entry in manifest.left_out}
    assert left_out["optimizer_states"].nbytes == 2000
    assert left_out["optimizer_states"].reason == "optimizer state, not weights"


def test_each_lightning_file_of_a_directory_is_a_checkpoint_and_links_are_not(tmp_path: Path) -> None:
    for step in (9, 10):
        write_lightning(tmp_path / f"epoch=0-step={step}.ckpt", {"a.w": torch.ones(2), "b.w": torch.ones(2)}, step)
    (tmp_path / "last.ckpt").symlink_to("epoch=0-step=10.ckpt")
    with pytest.raises(AmbiguousCheckpointError, match="2 checkpoints"):
        locate(tmp_path)
    (tmp_path / "epoch=0-step=9.ckpt").unlink()
    assert locate(tmp_path).global_step == 10
    assert locate(tmp_path / "last.ckpt").path == tmp_path / "last.ckpt"


def test_the_prefix_comes_from_the_config_and_other_tensors_are_left_out(tmp_path: Path) -> None:
    weights = llama()
    state_dict = {"ema_count": torch.tensor(3), **{f"model.{name}": t for name, t in weights.items()}}
    write_lightning(tmp_path / "checkpoints" / "last.ckpt", state_dict)
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    manifest = without_wrapper_prefix(open_at(tmp_path / "checkpoints" / "last.ckpt"))
    assert values(manifest) == raw(weights)
    assert [entry.name for entry in manifest.left_out if entry.reason == NOT_IN_MODEL] == ["ema_count"]


def test_a_wrappers_own_tensors_do_not_hide_its_prefix_in_a_single_file(tmp_path: Path) -> None:
    weights = llama()
    wrapped = {**{f"lm.{name}": t for name, t in weights.items()}, "loss.weight": torch.ones(3)}
    torch.save({"state_dict": wrapped}, tmp_path / "model.pt")
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    manifest = without_wrapper_prefix(open_at(tmp_path / "model.pt"))
    assert values(manifest) == raw(weights)
    assert [entry.name for entry in manifest.left_out] == ["loss.weight"]


def test_a_module_that_the_trainer_saved_without_a_config_is_unwrapped_by_the_one_that_is_named(tmp_path: Path) -> None:
    weights = llama()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(TINY_LLAMA))
    save_file(
        {**{f"llm.{n}": t for n, t in weights.items()}, "head.bias": torch.ones(3)}, tmp_path / "model.safetensors"
    )
    manifest = without_wrapper_prefix(open_at(tmp_path, tmp_path / "config"))
    assert values(manifest) == raw(weights)
    assert [entry.name for entry in manifest.left_out] == ["head.bias"]
    # Names of an older transformers are left to the loader, which knows them.
    old = {name.replace("norm.weight", "norm.gamma"): tensor for name, tensor in weights.items()}
    save_file(old, tmp_path / "model.safetensors")
    assert values(without_wrapper_prefix(open_at(tmp_path, tmp_path / "config"))) == raw(old)


def test_two_models_in_one_state_dict_are_refused(tmp_path: Path) -> None:
    both = {f"{part}.{name}": t for part in ("student", "teacher") for name, t in llama().items()}
    torch.save(both, tmp_path / "model.pt")
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    with pytest.raises(InconsistentCheckpointError, match="several prefixes"):
        without_wrapper_prefix(open_at(tmp_path / "model.pt"))


def test_a_single_file_of_another_kind_of_model_keeps_its_names(tmp_path: Path) -> None:
    weights = {**llama(), "v_head.weight": torch.ones(1, 8)}
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    torch.save(weights, tmp_path / "model.pt")
    assert values(without_wrapper_prefix(open_at(tmp_path / "model.pt"))) == raw(weights)
    del weights["lm_head.weight"]
    torch.save(weights, tmp_path / "model.pt")
    manifest = without_wrapper_prefix(open_at(tmp_path / "model.pt"))
    assert values(manifest) == raw(weights)
    assert any("lm_head.weight, which is not here" in note for note in manifest.notes)


@pytest.mark.parametrize("lightning", [True, False])
def test_a_model_that_peft_wrapped_is_unwrapped_by_peft_s_names(tmp_path: Path, lightning: bool) -> None:
    """A config beside the file tells the base model's names, which these are not."""
    weights = {f"base_model.model.{name}": t for name, t in llama().items()}
    query = "base_model.model.model.layers.0.self_attn.q_proj"
    weights[f"{query}.base_layer.weight"] = weights.pop(f"{query}.weight")
    weights |= {f"{query}.lora_A.default.weight": torch.ones(2, 8), f"{query}.lora_B.default.weight": torch.ones(8, 2)}
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    if lightning:
        others = {"loss.weight": torch.ones(3)}
        write_lightning(tmp_path / "last.ckpt", {**others, **{f"net.{name}": t for name, t in weights.items()}})
    else:
        torch.save(weights, tmp_path / "model.pt")
    manifest = without_wrapper_prefix(open_at(tmp_path / ("last.ckpt" if lightning else "model.pt")))
    assert values(manifest) == raw(weights)
    assert manifest.adapter is not None
    assert [entry.name for entry in manifest.left_out if "PEFT" in entry.reason] == ["loss.weight"] * lightning


def test_the_prefix_may_stand_before_the_names_that_the_model_has_in_memory(tmp_path: Path) -> None:
    mixtral = {**TINY_LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 2}
    (tmp_path / "config.json").write_text(json.dumps(mixtral))
    live = describe_model(tmp_path).live_shapes
    assert live, "transformers stacks experts in memory only"
    weights = {name: torch.randn(shape) for name, shape in live.items()}
    write_lightning(tmp_path / "last.ckpt", {f"model.{name}": tensor for name, tensor in weights.items()})
    assert values(without_wrapper_prefix(open_at(tmp_path / "last.ckpt"))) == raw(weights)


def test_a_config_of_another_model_is_refused(tmp_path: Path) -> None:
    weights = {**llama(), "lm_head.weight": torch.ones(21, 8)}
    write_lightning(tmp_path / "last.ckpt", {f"model.{name}": t for name, t in weights.items()})
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    with pytest.raises(InconsistentCheckpointError, match=r"model\.lm_head\.weight"):
        without_wrapper_prefix(open_at(tmp_path / "last.ckpt"))


def test_a_cut_lightning_file_is_not_complete(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write_lightning(path, {"a.w": torch.ones(200)})
    path.write_bytes(path.read_bytes()[:-100])
    location = locate(path)
    assert check(location).state == "in-progress"
    with pytest.raises(CheckpointError):
        read(location, ReadOptions())


@pytest.mark.parametrize("name", ["model", "net"])
def test_a_file_that_fabric_saved_is_read_under_the_name_that_a_person_gave(tmp_path: Path, name: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model, optimizer = fabric.setup(net := Linear(3, 2), SGD(net.parameters(), momentum=0.9))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    fabric.save(tmp_path / "state.ckpt", {name: model, "opt": optimizer, "iteration": 5})
    manifest = open_at(tmp_path)
    assert values(manifest) == raw(model.state_dict())
    assert {entry.name for entry in manifest.left_out} == {"opt", "iteration"}


def test_two_models_that_fabric_saved_are_refused(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    models = {name: fabric.setup_module(Linear(3, 2)) for name in ("generator", "discriminator")}
    fabric.save(tmp_path / "gan.ckpt", models)
    with pytest.raises(UnsupportedCheckpointError, match="generator, discriminator"):
        open_at(tmp_path / "gan.ckpt")


def test_composers_file_has_the_model_in_a_dict_beside_lists_of_random_states(tmp_path: Path) -> None:
    weights = {"model.a.w": torch.randn(3), "model.b.w": torch.randn(2, 2)}
    moments = {name: {"exp_avg": torch.zeros_like(weight)} for name, weight in weights.items()}
    state = {
        "model": weights,
        "optimizers": {"DecoupledAdamW": {"state": moments, "param_groups": [{"lr": 0.1}]}},
        "train_metrics": {"loss": torch.tensor(0.5)},
        "timestamp": {"batch": 10},
    }
    rng = [{"torch": torch.get_rng_state(), "python": (3, (1, 2), None)}]
    torch.save({"state": state, "rng": rng}, tmp_path / "ep0-ba10-rank0.pt")
    manifest = open_at(tmp_path / "ep0-ba10-rank0.pt")
    assert values(manifest) == raw(weights)
    assert {entry.name for entry in manifest.left_out} == {
        "rng",
        "state.optimizers",
        "state.train_metrics",
        "state.timestamp",
    }


@pytest.mark.parametrize("key", [None, "model", "state_dict", "module", "model_state_dict"])
@pytest.mark.parametrize("name", ["final.pt", "final.pth", "weights.bin"])
def test_a_full_state_dict_may_lie_under_one_key(tmp_path: Path, key: str | None, name: str) -> None:
    weights = {"a.w": torch.randn(3), "b.w": torch.randn(2, 2)}
    optimizer = {"state": {0: {"exp_avg": torch.full((9,), torch.nan)}}, "param_groups": []}
    torch.save(weights if key is None else {"optimizer": optimizer, key: weights, "step": 3}, tmp_path / name)
    manifest = open_at(tmp_path / name)
    assert manifest.layout == "full-state-dict"
    assert values(manifest) == raw(weights)
    assert {entry.name for entry in manifest.left_out} == (set() if key is None else {"optimizer", "step"})


def test_the_model_of_a_dcp_app_that_became_one_torch_file_is_found(tmp_path: Path) -> None:
    weights = {"a.w": torch.randn(3), "b.w": torch.randn(2, 2)}
    optimizer = {"state": {"a.w": {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in one process
        state = {"app": {"model": weights, "optim": optimizer}, "epoch": 3}
        dcp.save(state, checkpoint_id=tmp_path / "step-3", no_dist=True)
        dcp_to_torch_save(tmp_path / "step-3", tmp_path / "model.pt")
    manifest = open_at(tmp_path / "model.pt")
    assert values(manifest) == raw(weights)
    assert {entry.name for entry in manifest.left_out} == {"app.optim", "epoch"}
    assert "the weights are under 'app.model' in the file" in manifest.notes


@pytest.mark.parametrize(
    "state",
    [
        {"optimizer": {"state": {"w": {"exp_avg": torch.ones(2)}}, "param_groups": []}},
        {"app": {"model": {"w": torch.ones(2)}, "state_dict": {"w": torch.ones(2)}}},
        {"app": {"model": {"w": torch.ones(2)}, "log_std": torch.ones(2)}},
        {"net": {"w": torch.ones(2)}, "critic": {"w": torch.ones(2)}},
        {"ema_net": {"w": torch.ones(2)}},
        {"app": {"model": {"w": torch.ones(2)}}, "teacher": {"model": {"w": torch.ones(2)}}},
    ],
    ids=["optimizer alone", "two inside", "array beside", "two nets", "average", "two apps"],
)
def test_a_dict_inside_another_that_is_not_clearly_the_model_is_refused(tmp_path: Path, state: dict[str, Any]) -> None:
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(UnsupportedCheckpointError, match="not a model's state dict"):
        open_at(tmp_path / "x.pt")


def test_two_state_dicts_in_one_file_are_refused(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "state_dict": {"w": torch.ones(2)}}, tmp_path / "x.pt")
    with pytest.raises(UnsupportedCheckpointError, match="under model, state_dict"):
        open_at(tmp_path / "x.pt")


@pytest.mark.parametrize("name", ["model_state_dict", "net"])
def test_the_last_loss_and_random_states_lie_beside_the_model(tmp_path: Path, name: str) -> None:
    weights = {"a.w": torch.randn(3), "b.w": torch.randn(2, 2)}
    beside = {"loss": torch.tensor(0.5), "rng": torch.arange(9, dtype=torch.uint8)}
    torch.save({name: weights, "optimizer_state_dict": {"state": {}}, **beside}, tmp_path / "x.pt")
    manifest = open_at(tmp_path / "x.pt")
    assert values(manifest) == raw(weights)
    assert {"loss", "rng"} < {entry.name for entry in manifest.left_out}


@pytest.mark.parametrize("name", ["model", "net"])
def test_an_array_beside_the_model_that_may_have_been_trained_is_refused(tmp_path: Path, name: str) -> None:
    torch.save({name: {"w": torch.ones(2)}, "log_std": torch.zeros(3)}, tmp_path / "x.pt")
    with pytest.raises(UnsupportedCheckpointError, match="nested"):
        open_at(tmp_path / "x.pt")


@pytest.mark.timeout(60)
def test_lists_that_name_one_list_billions_of_times_take_no_time(tmp_path: Path) -> None:
    laughs: list[object] = []
    for _ in range(31):
        laughs = [laughs, laughs]
    torch.save({"w": torch.ones(2), "laughs": laughs}, tmp_path / "flat.pt")
    torch.save({"model": {"w": torch.ones(2)}, "laughs": laughs}, tmp_path / "beside.pt")
    for name in ("flat.pt", "beside.pt"):
        assert list(open_at(tmp_path / name).tensors) == ["w"]


def test_an_optimizers_file_is_not_a_model(tmp_path: Path) -> None:
    state = {"state": {"w": {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": ["w"]}]}
    torch.save(state, tmp_path / "adam.pt")
    with pytest.raises(UnsupportedCheckpointError, match="not a model's state dict"):
        open_at(tmp_path / "adam.pt")


@pytest.mark.parametrize("name", ["optimizer.bin", "mp_rank_00_model_states.pt", "rng_state_0.pth", "scheduler.pt"])
def test_files_that_are_known_to_be_parts_of_something_else_are_no_models(tmp_path: Path, name: str) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(NotACheckpointError):
        locate(tmp_path / name)


def test_a_directory_whose_only_weights_are_a_torch_file_is_answered_with_its_name(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "lit_model.pth")
    torch.save({"w": torch.ones(2)}, tmp_path / "optimizer.bin")
    with pytest.raises(NotACheckpointError, match=r"name it itself: lit_model\.pth$"):
        locate(tmp_path)


def test_names_on_one_storage_are_ties(tmp_path: Path) -> None:
    embed = torch.randn(4, 2)
    torch.save({"embed.weight": embed, "head.weight": embed, "n.w": torch.ones(1)}, tmp_path / "x.pt")
    manifest = open_at(tmp_path / "x.pt")
    assert manifest.ties == {"head.weight": "embed.weight"}
    assert list(manifest.tensors) == ["embed.weight", "n.w"]


def test_parts_that_wrappers_insert_leave_the_names(tmp_path: Path) -> None:
    torch.save({"module._orig_mod.a.w": torch.ones(2), "module._orig_mod.b.w": torch.ones(2)}, tmp_path / "x.pt")
    assert list(open_at(tmp_path / "x.pt").tensors) == ["a.w", "b.w"]


def test_accelerates_full_state_dict_is_found_in_its_directory(tmp_path: Path) -> None:
    weights = {"model.a.w": torch.randn(3), "lm_head.weight": torch.randn(2)}
    torch.save(weights, tmp_path / "pytorch_model_fsdp.bin")
    torch.save({"state": {"model.a.w": {"exp_avg": torch.ones(3)}}, "param_groups": []}, tmp_path / "optimizer.bin")
    (tmp_path / "random_states_0.pkl").write_bytes(b"\x80\x04N.")
    assert values(open_at(tmp_path)) == raw(weights)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("lightning-ckpt/input/checkpoints/epoch=0-step=4.ckpt", "lightning-ckpt"),
        ("lightning-ckpt/input/checkpoints/last.ckpt", "lightning-ckpt"),
        ("acc-fsdp1-full-w2/input", "acc-fsdp1-full-w2"),
    ],
)
def test_files_that_the_trainers_wrote_hold_the_expected_bits(fixtures_dir: Path, path: str, expected: str) -> None:
    from safetensors.torch import load_file

    manifest = without_wrapper_prefix(open_at(fixtures_dir / path))
    assert values(manifest) == raw(load_file(fixtures_dir / expected / "expected.safetensors"))
