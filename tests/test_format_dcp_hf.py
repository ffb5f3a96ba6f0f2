"""Slices in safetensors files, as DCP's Hugging Face storage writer leaves them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from ckptflow.errors import CorruptFileError, IncompleteCheckpointError, InconsistentCheckpointError
from ckptflow.formats.base import ReadOptions
from ckptflow.formats.dcp_hf import DcpHuggingFaceShards
from ckptflow.formats.registry import find_at
from ckptflow.manifest import CheckpointManifest
from dcp_hf_writer import CONFIG, EMBEDDING, NORM, write_rank
from reading import read_source

FORMAT = DcpHuggingFaceShards()


def two_ranks(path: Path) -> Path:
    write_rank(path, 1, model__embed_tokens__weight=([0, 0], EMBEDDING[:6]), model__norm__weight=([0], NORM))
    return write_rank(path, 2, model__embed_tokens__weight=([6, 0], EMBEDDING[6:]))


def read(path: Path, config_dir: Path | None = None) -> CheckpointManifest:
    (location,) = FORMAT.find(path)
    return FORMAT.read(location, ReadOptions(config_dir=config_dir))


def test_slices_are_placed_by_their_saved_offsets(tmp_path: Path) -> None:
    manifest = read(two_ranks(tmp_path / "c"))
    assert manifest.world_size == 2
    assert torch.equal(torch.from_numpy(read_source(manifest.tensors["model.embed_tokens.weight"])), EMBEDDING)
    assert torch.equal(torch.from_numpy(read_source(manifest.tensors["model.norm.weight"])), NORM)
    assert [location.layout for location in find_at(tmp_path / "c")] == ["dcp-hf"]


def test_what_torchs_own_writer_leaves_is_read(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in one process
        writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
        dcp.save({"w": EMBEDDING, "b": NORM.bfloat16()}, storage_writer=writer, no_dist=True)
    manifest = read(tmp_path)
    assert torch.equal(torch.from_numpy(read_source(manifest.tensors["w"])), EMBEDDING)
    assert manifest.tensors["b"].dtype.name == "bfloat16"


def test_a_missing_first_rank_is_incomplete(tmp_path: Path) -> None:
    path = two_ranks(tmp_path / "c")
    (path / "shard-00001-model-00001-of-00001.safetensors").unlink()
    (location,) = FORMAT.find(path)
    assert FORMAT.check(location).state == "in-progress"  # it may still be being written
    with pytest.raises(IncompleteCheckpointError, match="files of a rank"):
        read(path)


def test_a_missing_last_rank_is_found_by_the_config(tmp_path: Path) -> None:
    path = two_ranks(tmp_path / "c")
    (path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(IncompleteCheckpointError, match="smaller tensor"):
        read(path, tmp_path / "config")


@pytest.mark.parametrize("config", [{"vocab_size": 12}, {"text_config": {"vocab_size": 12}}], ids=["plain", "nested"])
def test_a_missing_last_rank_is_found_though_the_model_is_unknown(tmp_path: Path, config: dict[str, Any]) -> None:
    path = two_ranks(tmp_path / "c")
    (path / "config.json").write_text(json.dumps({"model_type": "of-ours", **config}))
    assert read(path).doubt is None
    (path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(IncompleteCheckpointError, match="smaller tensor"):
        read(path)


def test_a_config_that_tells_no_size_is_not_enough(tmp_path: Path) -> None:
    path = two_ranks(tmp_path / "c")
    (path / "config.json").write_text(json.dumps({"model_type": "of-ours"}))
    assert "missing unnoticed" in (read(path).doubt or "")


def test_a_layer_that_only_a_missing_stage_had_is_found_by_the_config(tmp_path: Path) -> None:
    path = write_rank(tmp_path / "c", 1, model__layers__0__input_layernorm__weight=([0], NORM))
    (path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 2}))
    with pytest.raises(IncompleteCheckpointError, match="in no file") as refused:
        read(path)
    assert refused.value.tensor == "model.layers.1.input_layernorm.weight"


def test_a_weight_file_that_no_rank_has_is_missing(tmp_path: Path) -> None:
    with pytest.raises(IncompleteCheckpointError, match="all ranks") as refused:
        read(write_rank(tmp_path / "c", 1, count=2, w=([0, 0], EMBEDDING)))
    assert "model-00002-of-00002" in str(refused.value.found)


def test_slices_that_leave_a_gap_are_refused(tmp_path: Path) -> None:
    path = write_rank(tmp_path / "c", 1, w=([0, 0], EMBEDDING[:4]))
    write_rank(path, 2, w=([6, 0], EMBEDDING[6:]))
    with pytest.raises(InconsistentCheckpointError, match="gap"):
        read(path)


def test_files_of_two_saves_are_refused(tmp_path: Path) -> None:
    path = write_rank(tmp_path / "c", 1, w=([0, 0], EMBEDDING[:6]))
    write_rank(path, 2, count=3, w=([6, 0], EMBEDDING[6:]))
    with pytest.raises(InconsistentCheckpointError, match="two saves"):
        read(path)


def test_a_slice_without_offsets_is_refused(tmp_path: Path) -> None:
    save_file({"w": NORM}, tmp_path / "shard-00001-model-00001-of-00001.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptFileError, match="DCP_SHARDING_INFO"):
        read(tmp_path)
