"""Megatron-Core's torch_dist checkpoints: stacked by a naive conversion, saved by DCP, read back as windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptflow.errors import IncompleteCheckpointError, InconsistentCheckpointError, UnsupportedCheckpointError
from ckptflow.formats.base import Location, ReadOptions
from ckptflow.formats.dcp import DcpDirectory
from ckptflow.formats.megatron_dist import MegatronDistCheckpoint
from ckptflow.formats.registry import find_at, find_below, locate
from ckptflow.manifest import CheckpointManifest
from ckptflow.plan import plan_from_manifest
from ckptflow.validate.reread.choose import SourceReader
from megatron_dist_writer import dist_tensors, save
from megatron_models import CONFIGS, args_of, config_of, hf_model
from reading import read_source

FORMAT = MegatronDistCheckpoint()


def read(out: Path) -> CheckpointManifest:
    (location,) = FORMAT.find(out)
    return FORMAT.read(location, ReadOptions(config_dir=out.parent / "config"))


@pytest.mark.parametrize("one_by_one", [False, True], ids=["stacked", "singletons"])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_comes_back_bit_for_bit(tmp_path: Path, family: str, one_by_one: bool) -> None:
    config = config_of(family)
    hf = hf_model(config)
    out = save(dist_tensors(hf, config, one_by_one), tmp_path / "iter_0000010", config)
    manifest = read(out)
    assert set(manifest.tensors) == set(hf)
    for name, tensor in hf.items():
        assert torch.equal(torch.from_numpy(read_source(manifest.tensors[name])), tensor), name
    assert {entry.name for entry in manifest.left_out} == {"optimizer", "_extra_state", "rng_state"}
    assert any("6 rows of vocabulary padding" in note for note in manifest.notes)
    assert (manifest.ties != {}) == config["tie_word_embeddings"]


def test_common_state_among_the_other_objects_is_read_there(tmp_path: Path) -> None:
    config = config_of("llama")
    hf = hf_model(config)
    out = save(dist_tensors(hf, config), tmp_path / "iter_0000010", config, in_one=True, tp=2)
    (location,) = find_at(out)
    assert FORMAT.check(location).state == "complete"
    manifest = read(out)
    assert set(manifest.tensors) == set(hf)
    assert manifest.mesh is not None
    assert manifest.mesh.shape == (2,)
    other = save(dist_tensors(hf, config), tmp_path / "iter_0000020", config, in_one=True, num_layers=9)
    with pytest.raises(InconsistentCheckpointError, match="num_layers"):
        read(other)


def test_common_state_that_is_nowhere_makes_it_incomplete(tmp_path: Path) -> None:
    config = config_of("llama")
    out = save(dist_tensors(hf_model(config), config), tmp_path / "iter_0000010", config)
    (out / "common.pt").unlink()
    (location,) = find_at(out)
    assert FORMAT.check(location).state == "incomplete"
    with pytest.raises(IncompleteCheckpointError, match="a file of the checkpoint is missing"):
        read(out)


def test_verls_saves_of_optimizer_and_random_state_beside_the_model_are_no_checkpoints(tmp_path: Path) -> None:
    config = config_of("llama")
    hf = hf_model(config)
    critic = tmp_path / "run" / "global_step_10" / "critic"
    save(dist_tensors(hf, config), critic / "model" / "dist_ckpt", config)
    for part in ("optimizer", "extra"):
        save({}, critic / part / "dist_ckpt", config)
    (critic / "model" / "config").rename(critic / "model" / "huggingface")
    (critic / "transformer_config.json").write_text('{"num_layers": 4}')
    (location,) = find_below(tmp_path / "run")
    assert (location.path, location.root, location.role) == (critic / "model" / "dist_ckpt", critic, "critic")
    assert FORMAT.check(location).state == "in-progress"
    (critic / "ckpt_contents.json").write_text("{}")
    assert FORMAT.check(location).state == "complete"
    manifest = FORMAT.read(location, ReadOptions())
    assert set(manifest.tensors) == set(hf)
    assert manifest.config_dir == critic / "model" / "huggingface"
    (critic / "transformer_config.json").write_text('{"num_layers": 9}')
    with pytest.raises(InconsistentCheckpointError, match="num_layers"):
        FORMAT.read(location, ReadOptions())


def test_an_adapter_in_megatrons_names_is_refused_with_the_way_to_the_one_in_pefts(tmp_path: Path) -> None:
    config = config_of("llama")
    adapter = {"decoder.layers.self_attention.linear_qkv.adapter.linear_in.weight": torch.ones(4, 2, 8)}
    actor = tmp_path / "global_step_5" / "actor"
    out = save(adapter, actor / "model" / "dist_ckpt", config)
    with pytest.raises(UnsupportedCheckpointError, match="an adapter in Megatron's names") as error:
        read(out)
    assert "Megatron-Bridge" in str(error.value.fix)
    exported = actor / "model" / "huggingface" / "adapter"
    exported.mkdir(parents=True)
    (exported / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedCheckpointError) as error:
        read(out)
    assert str(exported) in str(error.value.fix)


@pytest.mark.parametrize("family", ["llama", "qwen3-tied", "mixtral"])
def test_a_model_inside_nemos_wrapper_is_that_model(tmp_path: Path, family: str) -> None:
    config = config_of(family)
    hf = hf_model(config)
    wrapped = {f"module.{name}": tensor for name, tensor in dist_tensors(hf, config).items()}
    out = save(wrapped, tmp_path / "m--epoch=0-step=10" / "weights", config)
    torch.save({"epoch": 0, "global_step": 10, "pytorch-lightning_version": "2.4.0", "loops": {}}, out / "common.pt")
    manifest = read(out)
    assert set(manifest.tensors) == set(hf)
    source = SourceReader(manifest)
    for fqn, tensor in hf.items():
        planned = next(t for t in plan_from_manifest(manifest).tensors if t.fqn == fqn)
        name = source.name_for(planned)
        assert name is not None
        assert torch.equal(torch.from_numpy(read_source(manifest.tensors[fqn])), tensor), fqn
        assert torch.equal(source.read(planned, name, (0,) * tensor.ndim, tuple(tensor.shape)), tensor), fqn


def test_it_is_megatrons_and_not_plain_dcp(tmp_path: Path) -> None:
    config = config_of("llama")
    out = save(dist_tensors(hf_model(config), config), tmp_path / "iter_0000010", config)
    assert DcpDirectory().find(out)
    assert [location.layout for location in find_at(out)] == ["megatron-dist"]
    assert FORMAT.check(find_at(out)[0]).state == "complete"


def test_verl_keeps_it_below_the_actor_with_the_config_beside(tmp_path: Path) -> None:
    config = config_of("qwen3-tied")
    actor = tmp_path / "global_step_7" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    (actor / "huggingface" / "config.json").write_text(json.dumps(config))
    (actor / "transformer_config.json").write_text(json.dumps(vars(args_of(config))))
    hf = hf_model(config)
    save(dist_tensors(hf, config), actor / "dist_ckpt", config)
    (actor / "config" / "config.json").unlink()
    location = locate(tmp_path)
    assert location == Location(
        layout="megatron-dist", path=actor / "dist_ckpt", root=actor, global_step=7, role="actor"
    )
    manifest = FORMAT.read(location, ReadOptions())
    assert manifest.config_dir == actor / "huggingface"
    assert set(manifest.tensors) == set(hf)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_attention_heads", 2), ("num_query_groups", 4), ("apply_layernorm_1p", True), ("rotary_interleaved", True)],
)
def test_what_megatron_was_told_is_held_against_the_config(tmp_path: Path, key: str, value: Any) -> None:
    config = config_of("llama")
    out = save(dist_tensors(hf_model(config), config), tmp_path / "iter_0000010", config, **{key: value})
    with pytest.raises((InconsistentCheckpointError, UnsupportedCheckpointError)):
        read(out)


def test_experts_that_are_missing_are_not_silently_left_out(tmp_path: Path) -> None:
    config = config_of("mixtral")
    tensors = dist_tensors(hf_model(config), config)
    del tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    with pytest.raises(InconsistentCheckpointError, match="lacks a tensor"):
        read(save(tensors, tmp_path / "iter_0000010", config))


def test_without_metadata_json_the_save_is_not_done(tmp_path: Path) -> None:
    config = config_of("llama")
    out = save(dist_tensors(hf_model(config), config), tmp_path / "iter_0000010", config)
    (out / "metadata.json").unlink()
    (location,) = FORMAT.find(out)
    assert FORMAT.check(location).state == "in-progress"
    with pytest.raises(IncompleteCheckpointError, match=r"metadata\.json"):
        read(out)


def test_other_backends_are_refused_by_name(tmp_path: Path) -> None:
    config = config_of("llama")
    out = save(dist_tensors(hf_model(config), config), tmp_path / "iter_0000010", config)
    (out / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    with pytest.raises(UnsupportedCheckpointError) as refused:
        read(out)
    assert refused.value.found == "zarr"
