"""Megatron-LM's legacy checkpoints: cut by a naive conversion, read back as windows, compared bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptflow.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    InconsistentCheckpointError,
    UnsupportedCheckpointError,
    UsageError,
)
from ckptflow.formats.base import ReadOptions
from ckptflow.formats.megatron_legacy import MegatronLegacyCheckpoint
from ckptflow.manifest import CheckpointManifest
from megatron_models import (
    CONFIGS,
    EXPERTS,
    H,
    Tensors,
    args_of,
    config_of,
    hf_model,
    megatron_layer,
    padded,
    save_rank,
    tensor_parallel_part,
)
from reading import read_source

FORMAT = MegatronLegacyCheckpoint()
PADDED_ROWS = 16


def write(
    tmp_path: Path,
    config: dict[str, Any],
    grid: tuple[int, int, int] = (1, 1, 1),
    stages: int = 1,
    fused: bool = False,
    experts: str = "sequential",
    **args: Any,
) -> tuple[Path, Tensors]:
    """A checkpoint of ``tp, pp, ep`` ranks and virtual stages; gives its directory and the weights that it holds."""
    tp, pp, ep = grid
    hf = hf_model(config)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(config))
    out = tmp_path / "iter_0000010"
    per_chunk = config["num_hidden_layers"] // (pp * stages)
    namespace = args_of(config, *grid, **args)
    for p in range(pp):
        for e in range(ep):
            for t in range(tp):
                chunks = []
                for stage in range(stages):
                    first = (stage * pp + p) * per_chunk
                    whole = stage_tensors(hf, config, range(first, first + per_chunk), fused)
                    part = {name: tensor_parallel_part(name, x, t, tp) for name, x in whole.items()}
                    chunks.append(local_experts(part, e, EXPERTS // ep, experts))
                named = {"model": chunks[0]} if stages == 1 else {f"model{i}": c for i, c in enumerate(chunks)}
                name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
                save_rank(out / name, named, namespace)
    return out, hf


def stage_tensors(hf: Tensors, config: dict[str, Any], layers: range, fused: bool) -> Tensors:
    found: Tensors = {}
    if layers.start == 0:
        found["embedding.word_embeddings.weight"] = padded(hf["model.embed_tokens.weight"], PADDED_ROWS)
    for local, layer in enumerate(layers):
        for name, tensor in megatron_layer(hf, layer, config, fused).items():
            found[f"decoder.layers.{local}.{name}"] = tensor
    if layers.stop == config["num_hidden_layers"]:
        found["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        head = hf.get("lm_head.weight", hf["model.embed_tokens.weight"])
        if "lm_head.weight" in hf or layers.start > 0:  # the last stage keeps a copy of a tied embedding
            found["output_layer.weight"] = padded(head, PADDED_ROWS)
    return found


def local_experts(part: Tensors, ep_rank: int, count: int, style: str) -> Tensors:
    """The rank's own experts, numbered from 0, in one of Megatron's three ways."""
    mine = range(ep_rank * count, (ep_rank + 1) * count)
    found: Tensors = {}
    grouped: dict[tuple[str, str], list[torch.Tensor]] = {}
    for name, tensor in part.items():
        prefix, mark, rest = name.partition("local_experts.")
        if not mark:
            found[name] = tensor
            continue
        number, _, linear = rest.partition(".")
        if int(number) not in mine:
            continue
        local = int(number) - mine.start
        if style == "sequential":
            found[f"{prefix}local_experts.{local}.{linear}"] = tensor
        elif style == "te":
            found[f"{prefix}{linear}{local}"] = tensor
        else:
            grouped.setdefault((prefix, linear), []).append(tensor.T)
    for (prefix, linear), tensors in grouped.items():
        stacked = torch.stack(tensors)  # GroupedMLP: [experts, in, out], kept as a flat matrix
        is_first = linear == "linear_fc1.weight"
        flat = stacked.reshape(H, -1) if is_first else stacked.reshape(-1, H)
        found[f"{prefix}{'weight1' if is_first else 'weight2'}"] = flat
    return found


def read(out: Path) -> CheckpointManifest:
    (location,) = FORMAT.find(out)
    return FORMAT.read(location, ReadOptions(config_dir=out.parent / "config"))


def assert_model(manifest: CheckpointManifest, hf: Tensors) -> None:
    assert set(manifest.tensors) == set(hf)
    for name, tensor in hf.items():
        assert torch.equal(torch.from_numpy(read_source(manifest.tensors[name])), tensor), name
    for check in manifest.equal:
        assert read_source(check.first).tobytes() == read_source(check.second).tobytes(), check.fqn


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 2, 1)], ids=["one rank", "tp 2 pp 2"])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_comes_back_bit_for_bit(
    tmp_path: Path, family: str, grid: tuple[int, int, int], fused: bool
) -> None:
    out, hf = write(tmp_path, config_of(family), grid, fused=fused)
    manifest = read(out)
    assert set(manifest.tensors) == set(hf)
    assert_model(manifest, {name: hf[name] for name in manifest.tensors})
    (location,) = FORMAT.find(out)
    assert FORMAT.check(location).state == "complete"
    assert manifest.world_size == grid[0] * grid[1]


@pytest.mark.parametrize("style", ["sequential", "te", "grouped"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_expert_parallel_ranks_hold_experts_in_any_of_three_ways(tmp_path: Path, family: str, style: str) -> None:
    out, hf = write(tmp_path, config_of(family), (2, 2, 2), experts=style)
    manifest = read(out)
    assert_model(manifest, {name: hf[name] for name in manifest.tensors})
    assert len(manifest.tensors) == len(hf)
    replicated = {check.fqn for check in manifest.equal}
    assert "decoder.layers.0.self_attention.linear_proj.weight" in replicated  # dense weights of both expert ranks


def test_expert_ranks_without_pipeline_ranks_have_names_of_two_parts(tmp_path: Path) -> None:
    out, hf = write(tmp_path, config_of("mixtral"), (1, 1, 2))
    assert sorted(path.name for path in out.iterdir()) == ["mp_rank_00_000", "mp_rank_00_001"]
    assert_model(read(out), hf)


def test_virtual_stages_interleave(tmp_path: Path) -> None:
    out, hf = write(tmp_path, config_of("qwen2", layers=8), (2, 2, 1), stages=2)
    assert_model(read(out), hf)


def test_a_tied_embedding_must_equal_the_last_stages_copy(tmp_path: Path) -> None:
    out, _ = write(tmp_path, config_of("qwen3-tied"), (1, 2, 1))
    manifest = read(out)
    assert manifest.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    (check,) = (check for check in manifest.equal if check.fqn == "lm_head.weight")
    assert read_source(check.first).tobytes() == read_source(check.second).tobytes()
    assert check.second.shape[0] == check.first.shape[0] == 10


def test_a_config_is_needed(tmp_path: Path) -> None:
    out, _ = write(tmp_path, config_of("llama"))
    (location,) = FORMAT.find(out)
    with pytest.raises(UsageError, match=r"no config\.json"):
        FORMAT.read(location, ReadOptions())


def test_a_missing_rank_is_incomplete(tmp_path: Path) -> None:
    out, _ = write(tmp_path, config_of("llama"), (2, 2, 1))
    (out / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    (location,) = FORMAT.find(out)
    assert FORMAT.check(location).state == "incomplete"
    with pytest.raises(IncompleteCheckpointError):
        read(out)
    (out / "mp_rank_01_001").rmdir()
    with pytest.raises(IncompleteCheckpointError, match="1 of 4 ranks"):
        read(out)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_attention_heads": 2, "num_key_value_heads": 3}, CheckpointError),
        ({"num_attention_heads": 6, "num_key_value_heads": 1}, InconsistentCheckpointError),
        ({"num_hidden_layers": 5}, InconsistentCheckpointError),
        ({"vocab_size": 40}, InconsistentCheckpointError),
        ({"model_type": "phi3"}, UnsupportedCheckpointError),
        ({"model_type": "qwen2"}, InconsistentCheckpointError),
        ({"model_type": "gemma"}, UnsupportedCheckpointError),
        ({"intermediate_size": 12}, InconsistentCheckpointError),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_of_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], error: type[Exception]) -> None:
    out, _ = write(tmp_path, config_of("llama"), (2, 1, 1))
    (tmp_path / "config" / "config.json").write_text(json.dumps(config_of("llama") | changes))
    with pytest.raises(error):
        read(out)


def test_an_expert_without_weights_is_refused(tmp_path: Path) -> None:
    out, _ = write(tmp_path, config_of("mixtral"))
    edit(out / "mp_rank_00", lambda s: s["model"].pop("decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"))
    with pytest.raises(InconsistentCheckpointError, match="lacks a tensor"):
        read(out)


def test_a_tensor_that_no_table_knows_is_refused(tmp_path: Path) -> None:
    out, _ = write(tmp_path, config_of("llama"))
    edit(out / "mp_rank_00", lambda s: s["model"].update({"decoder.layers.0.adapter.weight": torch.ones(2)}))
    with pytest.raises(UnsupportedCheckpointError, match="don't know"):
        read(out)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"checkpoint_version": 1.0}, UnsupportedCheckpointError),
        ({"iteration": 20}, InconsistentCheckpointError),
        ({"args": args_of(config_of("llama"), 2, 2)}, InconsistentCheckpointError),
    ],
    ids=["old QKV order", "another step", "another grid"],
)
def test_ranks_of_other_saves_are_refused(tmp_path: Path, changes: dict[str, Any], error: type[Exception]) -> None:
    out, _ = write(tmp_path, config_of("llama"), (2, 1, 1))
    edit(out / "mp_rank_01", lambda state: state.update(changes))
    with pytest.raises(error):
        read(out)


def test_ranks_that_a_wider_run_left_are_refused(tmp_path: Path) -> None:
    out, _ = write(tmp_path, config_of("llama"), (2, 1, 1))
    shutil.copytree(out / "mp_rank_01", out / "mp_rank_02")
    with pytest.raises(InconsistentCheckpointError, match="did not have"):
        read(out)


def edit(rank: Path, change: Any) -> None:
    """Load the file that this test wrote, change it, write it back."""
    state = torch.load(rank / "model_optim_rng.pt", weights_only=False)
    change(state)
    torch.save(state, rank / "model_optim_rng.pt")


def test_a_value_head_becomes_score(tmp_path: Path) -> None:
    config = config_of("llama", architectures=["LlamaForTokenClassification"], id2label={"0": "LABEL_0"})
    out, hf = write(tmp_path, config, (2, 1, 1))
    head = torch.randn(1, H)
    for rank in ("mp_rank_00", "mp_rank_01"):
        edit(out / rank, lambda s: s["model"].update({"output_layer.weight": head, "output_layer.bias": torch.ones(1)}))
    del hf["lm_head.weight"]
    assert_model(read(out), {**hf, "score.weight": head, "score.bias": torch.ones(1)})
