"""Saves that were killed: files of two saves are never taken for a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import Shard

from ckptflow.errors import CheckpointError, IncompleteCheckpointError
from ckptflow.formats.registry import check, locate
from ckptflow.formats.written_together import check_written_together
from ckptflow.tensors import SourceFile
from dcp_hf_writer import CONFIG, EMBEDDING, write_rank
from deepspeed_writer import parameters, write_zero2
from faults import age, converted, refused, save_dcp
from megatron_legacy_writer import write as write_megatron
from megatron_models import config_of
from rank_writer import mesh_of, rank_name, save_ranks, sharded

HOUR = 3600
WEIGHTS = {"model.layers.0.a.weight": torch.randn(8, 4), "lm_head.weight": torch.randn(16, 4)}
TWO_SAVES = "not written together"


def rank_files(path: Path, step: float) -> Path:
    mesh = {"w": torch.full((8, 4), step), "b.c": torch.full((6,), step)}
    return save_ranks(path, 2, lambda rank: {n: sharded(t, mesh_of([2]), [Shard(0)]) for n, t in mesh.items()})


def shards(path: Path, step: float) -> Path:
    path.mkdir(exist_ok=True)
    names = {f"layer.{n}.weight": f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}
    for fqn, name in names.items():
        save_file({fqn: torch.full((4, 4), step)}, path / name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return path


def slices(path: Path, step: float) -> Path:
    write_rank(path, 1, model__embed_tokens__weight=([0, 0], EMBEDDING[:6] + step))
    return write_rank(path, 2, model__embed_tokens__weight=([6, 0], EMBEDDING[6:] + step))


def zero_2(path: Path, step: float) -> Path:
    groups = [{name: value + step for name, value in parameters({"a.weight": (8, 3), "b.weight": (5,)}).items()}]
    return write_zero2(path, groups, 2)


def megatron(path: Path, step: float) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return write_megatron(path, config_of("llama"), (2, 1, 1))[0]


LAYOUTS: dict[str, tuple[Callable[[Path, float], Path], str]] = {
    "fsdp": (rank_files, rank_name(2, 1)),
    "huggingface": (shards, "model-00002-of-00003.safetensors"),
    "dcp-hf": (slices, "shard-00002-model-00001-of-00001.safetensors"),
    "deepspeed": (zero_2, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    "megatron-legacy": (megatron, "mp_rank_01/model_optim_rng.pt"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_save_over_an_older_one_that_stopped_between_two_files_is_refused(tmp_path: Path, layout: str) -> None:
    save, other = LAYOUTS[layout]
    path = save(tmp_path / "step", 1.0)
    assert (locate(path).layout, check(locate(path)).state == "complete") == (layout, layout != "dcp-hf")
    age(path, 2 * HOUR)
    kept = (path / other).read_bytes(), (path / other).stat()
    path = save(tmp_path / "step", 2.0)
    (path / other).write_bytes(kept[0])
    os.utime(path / other, ns=(kept[1].st_mtime_ns, kept[1].st_mtime_ns))
    for _ in range(2):  # at once, and when nothing has changed for a long time
        assert check(locate(path)).state != "complete"
        assert TWO_SAVES in check(locate(path)).reason
        age(path, 86400)
    if layout != "megatron-legacy":  # which wants a config that fits
        error = refused(path, tmp_path / "out")
        assert TWO_SAVES in error.what
        assert "2.0 hours" in str(error.found)
        assert "touch all of them" in str(error.fix)


def test_files_that_a_person_touches_are_of_one_save(tmp_path: Path) -> None:
    path = shards(tmp_path / "step", 1.0)
    age(path / "model-00001-of-00003.safetensors", HOUR)
    assert TWO_SAVES in refused(path, tmp_path / "out").what
    for file in path.iterdir():
        file.touch()
    assert len(converted(path, tmp_path / "out")[0]) == 3


@pytest.mark.parametrize("proof", [".cache/huggingface/x", "ckptflow.json"])
def test_downloads_and_conversions_that_went_on_later_are_whole(tmp_path: Path, proof: str) -> None:
    path = shards(tmp_path / "step", 1.0)
    (path / proof).parent.mkdir(parents=True, exist_ok=True)
    (path / proof).write_text("{}")
    age(path / "model-00001-of-00003.safetensors", 100 * HOUR)
    assert check(locate(path)).state == "complete"


def files(*written: tuple[float, float]) -> list[SourceFile]:
    return [SourceFile(f"{n}.pt", int(nbytes), int(at * 1e9)) for n, (at, nbytes) in enumerate(written)]


def test_files_that_were_copied_one_after_the_other_are_together() -> None:
    check_written_together(files(*((n * 1500.0, 1e9) for n in range(100))))
    check_written_together(files((0, 1e6), (3 * HOUR, 1e11)))  # 100 GB at 10 MB/s
    with pytest.raises(IncompleteCheckpointError):
        check_written_together(files((0, 1e6), (3 * HOUR, 1e9)))
    with pytest.raises(IncompleteCheckpointError):
        check_written_together(files((3 * HOUR, 1e9), (0, 1e11), (60, 1e6)))


@pytest.mark.parametrize("save", [shards, slices])
def test_a_half_written_file_of_a_newer_save_is_refused(tmp_path: Path, save: Callable[[Path, float], Path]) -> None:
    path = save(tmp_path / "step", 1.0)
    (path / ".tmpkX42bZ").write_bytes(b"half")
    age(path, HOUR)
    age(path / ".tmpkX42bZ", 60)
    assert converted(path, tmp_path / "before", **WITH_CONFIG[save](tmp_path))[0], "the save after it went through"
    os.utime(path / ".tmpkX42bZ")
    assert check(locate(path)).state != "complete"
    assert "has not finished" in refused(path, tmp_path / "out", **WITH_CONFIG[save](tmp_path)).what


def _config(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "config").mkdir(exist_ok=True)
    (tmp_path / "config" / "config.json").write_text(json.dumps(CONFIG))
    return {"config_dir": tmp_path / "config"}


WITH_CONFIG: dict[object, Callable[[Path], dict[str, Path]]] = {shards: lambda _: {}, slices: _config}


def test_metadata_of_a_later_save_over_data_files_of_an_older_one_is_refused(tmp_path: Path) -> None:
    path = save_dcp({"model": WEIGHTS}, tmp_path / "c")
    assert check(locate(path)).state == "complete"
    age(path / "__0_0.distcp", HOUR)
    assert TWO_SAVES in check(locate(path)).reason
    assert TWO_SAVES in refused(path, tmp_path / "out").what


@pytest.mark.parametrize("half", ["first", "second"])
def test_a_data_file_with_zeros_at_an_end_is_incomplete(tmp_path: Path, half: str) -> None:
    path = save_dcp({"model": WEIGHTS}, tmp_path / "c")
    data = (path / "__0_0.distcp").read_bytes()
    middle = len(data) // 2
    data = bytes(middle) + data[middle:] if half == "first" else data[:middle] + bytes(len(data) - middle)
    written = (path / ".metadata").stat().st_mtime_ns
    (path / "__0_0.distcp").write_bytes(data)
    os.utime(path / "__0_0.distcp", ns=(written, written))
    verdict = check(locate(path))
    assert (verdict.state, "zeros" in verdict.reason) == ("incomplete", True)
    refused(path, tmp_path / "out")


def test_data_files_of_two_steps_are_not_complete(tmp_path: Path) -> None:
    for step in (1, 2):
        steps = {"state": {fqn: {"step": torch.tensor(float(step))} for fqn in WEIGHTS}}
        save_dcp(
            {"model": WEIGHTS, "optim": steps, "train_state": {"step": torch.tensor(step)}}, tmp_path / f"step-{step}"
        )
    shutil.copy2(tmp_path / "step-2" / "__0_0.distcp", tmp_path / "step-1" / "__0_0.distcp")
    for file in (tmp_path / "step-1").iterdir():
        os.utime(file, (1e9, 1e9))
    verdict = check(locate(tmp_path / "step-1"))
    assert (verdict.state, "another step" in verdict.reason) == ("incomplete", True)


def test_rank_files_of_two_steps_are_not_complete(tmp_path: Path) -> None:
    path = rank_files(tmp_path / "global_step_4" / "actor", 1.0)
    for rank, step in enumerate((3, 4)):
        schedule = {"lr_scheduler": {"last_epoch": step}}
        torch.save(schedule, path / rank_name(2, rank).replace("model_", "extra_state_"))
    verdict = check(locate(path))
    assert (verdict.state, "different steps" in verdict.reason) == ("incomplete", True)


def test_an_index_of_another_save_is_not_complete(tmp_path: Path) -> None:
    path = shards(tmp_path / "step", 1.0)
    save_file({"layer.9.weight": torch.ones(4, 4)}, path / "model-00002-of-00003.safetensors")
    verdict = check(locate(path))
    assert (verdict.state, "index and weight files disagree" in verdict.reason) == ("incomplete", True)


def test_every_refusal_here_tells_what_to_do(tmp_path: Path) -> None:
    for layout, (save, other) in LAYOUTS.items():
        path = save(tmp_path / layout, 1.0)
        os.utime(path / other, (1e9, 1e9))
        with pytest.raises(CheckpointError, match="what to do"):
            converted(path, tmp_path / "out")
