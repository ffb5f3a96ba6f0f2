"""LoRA in a plan: what PEFT trains and saves folds to what PEFT merges, and goes out as what PEFT writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

from ckptflow.errors import (
    CheckpointError,
    CkptflowError,
    InconsistentCheckpointError,
    UnsafeFileError,
    UnsupportedCheckpointError,
    UsageError,
)
from ckptflow.formats.base import ReadOptions
from ckptflow.formats.registry import check, locate, read
from ckptflow.manifest import AdapterSpec, CheckpointManifest
from ckptflow.plan import ConsolidationPlan, plan_from_manifest
from ckptflow.transforms.lora import export_adapter, fold_lora
from ckptflow.transforms.lora_config import expected_rank, scale_of
from peft_models import (
    save_apart,
    save_beside_dcp,
    save_beside_fsdp1,
    save_beside_fsdp2,
    save_without_frozen,
    save_wrapped,
    tiny,
    trained,
)
from rank_writer import rank_name
from reading import folded_values, read_source


def manifest_of(path: Path, **options: Any) -> CheckpointManifest:
    return read(locate(path), ReadOptions(**options))


def folded(path: Path, alpha: float | None = None, **options: Any) -> ConsolidationPlan:
    manifest = manifest_of(path, **options)
    assert manifest.adapter is not None
    return fold_lora(plan_from_manifest(manifest), manifest.adapter, alpha)


def assert_merged(plan: ConsolidationPlan, merged: Mapping[str, torch.Tensor]) -> None:
    """The plan gives the merged model, and uses every tensor of the checkpoint once or says why not."""
    assert {tensor.fqn for tensor in plan.tensors} == set(merged)
    for tensor in plan.tensors:
        np.testing.assert_allclose(folded_values(tensor), merged[tensor.fqn].double().numpy(), rtol=1e-5, atol=1e-6)


ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "r": 3},
    "dora": {"use_dora": True},
    "dora on all kinds": {"use_dora": True, "target_modules": ["up", "embed", "conv"]},
    "dora transposed": {"use_dora": True, "target_modules": ["turned"], "fan_in_fan_out": True},
    "conv1d": {"target_modules": ["turned"], "fan_in_fan_out": True},
    "embedding": {"target_modules": ["embed"]},
    "convolution": {"target_modules": ["conv"]},
    "patterns": {"rank_pattern": {"up": 4, "s.*e": 1}, "alpha_pattern": {"^square": 9, "up": 1.5}},
    "modules to save": {"modules_to_save": ["head", "embed"]},
    "lora bias": {"lora_bias": True, "target_modules": ["up", "head"]},
    "all biases": {"bias": "all"},
}


@pytest.mark.filterwarnings("ignore:.*invalid shape:peft.utils.warning.PeftWarning")  # PEFT's own lora_bias
@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize(
    "save",
    [save_apart, save_wrapped, save_without_frozen, save_beside_fsdp1, save_beside_fsdp2, save_beside_dcp],
)
def test_adapters_fold_to_what_peft_merges(
    tmp_path: Path, options: dict[str, Any], save: Callable[[PeftModel, Path], Path]
) -> None:
    model = trained(**options)
    plan = folded(save(model, tmp_path))
    merged = model.merge_and_unload().state_dict()
    assert any(not torch.equal(merged[name], value) for name, value in tiny().state_dict().items())
    assert_merged(plan, merged)


@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
def test_every_tensor_of_the_checkpoint_is_used_once_or_accounted_for(tmp_path: Path, options: dict[str, Any]) -> None:
    path = save_wrapped(trained(**options), tmp_path)
    manifest = manifest_of(path)
    plan = folded(path)
    used = [name for tensor in plan.tensors for name in tensor.source_fqns] + [entry.name for entry in plan.left_out]
    used += list(plan.ties)
    assert sorted(used) == sorted(manifest.tensors)


@pytest.mark.filterwarnings("ignore:.*invalid shape:peft.utils.warning.PeftWarning")  # PEFT's own lora_bias
@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
def test_an_exported_adapter_is_what_peft_writes(tmp_path: Path, options: dict[str, Any]) -> None:
    model = trained(**options)
    (tmp_path / "wrapped").mkdir()
    manifest = manifest_of(save_wrapped(model, tmp_path / "wrapped"))
    assert manifest.adapter is not None
    plan, config = export_adapter(plan_from_manifest(manifest), manifest.adapter, None)
    save_apart(model, tmp_path)
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    if options.get("bias") == "all":
        return  # biases of the base layers stay in the base there; they are not told apart from untrained ones
    assert {tensor.fqn for tensor in plan.tensors} == set(written)
    for tensor in plan.tensors:
        assert read_source(tensor.source).tolist() == written[tensor.fqn].tolist()
    assert config["lora_alpha"] == 6
    assert config["r"] == model.peft_config["default"].r


@pytest.mark.parametrize("save", [save_apart, save_without_frozen])
def test_an_adapter_without_its_base_is_refused_for_folding_and_can_be_exported(
    tmp_path: Path, save: Callable[[PeftModel, Path], Path]
) -> None:
    adapter = save(trained(), tmp_path)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="without its base model") as error:
        folded(adapter)
    assert "--base-model" in str(error.value)
    manifest = manifest_of(adapter)
    assert manifest.adapter is not None
    plan, config = export_adapter(plan_from_manifest(manifest), manifest.adapter, None)
    assert {tensor.fqn for tensor in plan.tensors} == set(load_file(adapter / "adapter_model.safetensors"))
    assert config["lora_alpha"] == 6
    assert_merged(folded(adapter, base_model=tmp_path / "moved"), trained().merge_and_unload().state_dict())


@pytest.mark.parametrize("name", ["/etc", "../outside", "org/model", "", None, "."])
def test_a_base_model_is_only_looked_for_beside_the_adapter(tmp_path: Path, name: str | None) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    adapter = save_apart(trained(), inside)
    (inside / "base").rename(tmp_path / "outside")
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": name}))
    assert all(fqn.startswith("base_model.model.") for fqn in manifest_of(adapter).tensors)


@pytest.mark.parametrize("tying", [True, False])
def test_a_head_that_peft_keeps_tied_may_be_missing_in_the_base(tmp_path: Path, tying: bool) -> None:
    adapter = save_apart(trained(modules_to_save=["embed"]), tmp_path)
    weights, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    saved = load_file(weights)
    embed = saved["base_model.model.embed.weight"]
    save_file({**saved, "base_model.model.lm_head.weight": embed.clone()}, weights)
    config.write_text(json.dumps({**json.loads(config.read_text()), "ensure_weight_tying": tying}))
    if not tying:
        with pytest.raises(InconsistentCheckpointError, match="doesn't have"):
            folded(adapter)
        return
    [head] = [tensor for tensor in folded(adapter).tensors if tensor.fqn == "lm_head.weight"]
    assert read_source(head.source).tolist() == embed.tolist()


def test_unknown_alpha_is_refused_until_given(tmp_path: Path) -> None:
    path = save_wrapped(trained(), tmp_path)
    (path / "lora_adapter" / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match="alpha") as error:
        folded(path)
    assert "--lora-alpha" in str(error.value)
    assert_merged(folded(path, alpha=6), trained().merge_and_unload().state_dict())
    manifest = manifest_of(path)
    assert manifest.adapter is not None
    with pytest.raises(CheckpointError, match="alpha"):
        export_adapter(plan_from_manifest(manifest), manifest.adapter, None)


@pytest.mark.parametrize("alone", [False, True], ids=["with its base", "alone"])
def test_the_short_note_that_verl_leaves_tells_alpha(tmp_path: Path, alone: bool) -> None:
    (tmp_path / "base").mkdir()
    save_file(dict(tiny().state_dict()), tmp_path / "base" / "model.safetensors")
    model, step = trained(), tmp_path / "global_step_5" / "actor"
    step.mkdir(parents=True)
    state = {name: tensor for name, tensor in model.state_dict().items() if not alone or "lora_" in name}
    torch.save(state, step / rank_name(1, 0))
    (step / "lora_train_meta.json").write_text('{"r": 2, "lora_alpha": 6, "task_type": "CAUSAL_LM"}')
    options = {"base_model": tmp_path / "base"} if alone else {}
    assert_merged(folded(step, **options), model.merge_and_unload().state_dict())
    with pytest.raises(UsageError, match="contradicts"):
        folded(step, alpha=7, **options)
    (step / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 6}')
    with pytest.raises(InconsistentCheckpointError, match="another rank"):
        folded(step)


def test_an_alpha_of_zero_counts_as_unknown(tmp_path: Path) -> None:
    path = save_wrapped(trained(), tmp_path)
    change_config(path / "lora_adapter", lora_alpha=0)
    with pytest.raises(CheckpointError, match="alpha"):
        folded(path)


def test_an_alpha_that_contradicts_the_config_is_refused(tmp_path: Path) -> None:
    path = save_wrapped(trained(), tmp_path)
    with pytest.raises(UsageError, match="contradicts"):
        folded(path, alpha=7)
    folded(path, alpha=6)


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = directory / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": "IA3"},
        {"target_parameters": ["experts.w"]},
        {"layer_replication": [[0, 2]]},
        {"trainable_token_indices": [1, 2]},
        {"use_qalora": True},
        {"arrow_config": {"top_k": 2}},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
    ],
    ids=str,
)
def test_adapters_that_can_not_be_folded_are_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    adapter = save_apart(trained(), tmp_path)
    change_config(adapter, **changes)
    with pytest.raises(UnsupportedCheckpointError) as error:
        folded(adapter)
    assert str(next(iter(changes.values()))).split("_")[0][:6].lower() in str(error.value).lower()


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: [tensors.pop(key) for key in list(tensors) if name in key] and None


def resize(name: str, shape: tuple[int, ...]) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({key: torch.ones(shape) for key in tensors if name in key})

    return change


def rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if old in key]:
            tensors[key.replace(old, new)] = tensors.pop(key)

    return change


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (drop("up.lora_A"), "lacks a tensor"),
        (drop("up.lora_B"), "lacks a tensor"),
        (resize("up.lora_A", (0,)), "empty tensor"),
        (resize("head.weight", (0,)), "empty tensor"),
        (resize("up.lora_A", (2, 5)), "don't fit"),
        (resize("up.lora_B", (6, 3)), "don't fit"),
        (resize("head.weight", (9, 6)), "another shape"),
        (rename("model.up", "model.down"), "doesn't have"),
        (rename("head.weight", "tail.weight"), "doesn't have"),
        (rename("up.lora_A.weight", "up.lora_A.other.weight"), ""),
        (rename("up.lora_A", "up.ia3_l"), "can't fold"),
        (rename("base_model.model.up", "up"), "no PEFT name"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], word: str
) -> None:
    adapter = save_apart(trained(modules_to_save=["head"]), tmp_path)
    change_tensors(adapter, change)
    if not word:
        folded(adapter)  # an adapter name in the middle changes nothing
        return
    with pytest.raises(CkptflowError, match=word):
        folded(adapter)


def test_a_rank_other_than_the_config_s_is_refused(tmp_path: Path) -> None:
    adapter = save_apart(trained(), tmp_path)
    change_config(adapter, r=8)
    with pytest.raises(InconsistentCheckpointError, match="another rank"):
        folded(adapter)


def test_several_adapters_in_one_checkpoint_are_refused(tmp_path: Path) -> None:
    model = trained()
    model.add_adapter("second", LoraConfig(r=2, target_modules=["up"]))
    with pytest.raises(UnsupportedCheckpointError, match="several adapters"):
        folded(save_wrapped(model, tmp_path))


def test_wrapped_names_without_an_adapter_are_refused(tmp_path: Path) -> None:
    state = {name: value for name, value in trained().state_dict().items() if "lora_" not in name}
    torch.save(state, tmp_path / rank_name(1, 0))
    with pytest.raises(InconsistentCheckpointError, match="no tensor of an adapter"):
        folded(tmp_path)


def test_a_square_weight_follows_the_config_and_its_neighbours(tmp_path: Path) -> None:
    model = trained(target_modules=["up", "square"])
    path = save_wrapped(model, tmp_path)
    change_config(path / "lora_adapter", fan_in_fan_out=True)
    with pytest.raises(InconsistentCheckpointError, match="does not tell"):
        folded(path)


def test_patterns_match_as_peft_matches_them() -> None:
    config = {"r": 8, "rank_pattern": {"q_proj": 2, "layers.1.k_proj": 3, r"layers\.\d.v_proj": 4}, "use_rslora": True}
    names = ["model.layers.0.q_proj", "my_q_proj", "model.layers.1.k_proj", "layers.1.k_proj.x", "layers.7.v_proj"]
    assert [expected_rank(config, name) for name in names] == [2, 8, 3, 8, 4]
    assert scale_of({**config, "alpha_pattern": {"q_proj": 4}}, names[0], 4, 16.0) == 2.0


@pytest.mark.parametrize("pattern", ["(a+)+$", "a*a*a*a*b", "x" * 600])
def test_patterns_that_could_take_for_ever_are_refused(pattern: str) -> None:
    with pytest.raises(UnsafeFileError):
        expected_rank({"rank_pattern": {pattern: 1}}, "a" * 60)


def test_ties_of_the_base_survive_unless_one_side_is_trained_apart(tmp_path: Path) -> None:
    for saved in (None, ["head"]):
        directory = tmp_path / str(saved)
        directory.mkdir()
        adapter = save_apart(trained(modules_to_save=saved), directory)
        state = dict(tiny().state_dict())
        state["alias.weight"] = state["head.weight"]
        (directory / "base" / "model.safetensors").unlink()
        torch.save(state, directory / "base" / "pytorch_model.bin")
        plan = folded(adapter)
        assert plan.ties == ({} if saved else {"alias.weight": "head.weight"})
        assert len(plan.tensors) + len(plan.ties) == len(state)


def test_an_adapter_directory_is_complete_with_config_and_tensors(tmp_path: Path) -> None:
    adapter = save_apart(trained(), tmp_path)
    location = locate(adapter)
    assert (location.layout, check(location).state) == ("peft", "complete")
    (adapter / "adapter_config.json").rename(adapter / "other.json")
    assert check(locate(adapter)).state == "incomplete"


def test_full_weights_beside_an_adapter_are_the_model(tmp_path: Path) -> None:
    adapter = save_apart(trained(), tmp_path)
    save_file(dict(tiny().state_dict()), adapter / "model.safetensors")
    manifest = manifest_of(adapter)
    assert manifest.layout == "huggingface"
    assert any(entry.name == "adapter_model.safetensors" for entry in manifest.left_out)


def test_a_spec_without_config_is_read_from_the_tensors(tmp_path: Path) -> None:
    path = save_wrapped(trained(rank_pattern={"up": 5}, modules_to_save=["head"], use_dora=True), tmp_path)
    (path / "lora_adapter" / "adapter_config.json").unlink()
    spec = manifest_of(path).adapter
    assert isinstance(spec, AdapterSpec)
    assert spec.config == {
        "peft_type": "LORA",
        "r": 5,
        "rank_pattern": {"square": 2},
        "target_modules": ["square", "up"],
        "use_dora": True,
        "modules_to_save": ["head"],
    }
