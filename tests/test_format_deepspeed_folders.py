"""Which DeepSpeed folder is meant: tags and ``latest``, folders of Lightning and of the HF Trainer, links."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptflow.errors import CheckpointError, IncompleteCheckpointError
from ckptflow.formats.base import ReadOptions
from ckptflow.formats.registry import locate
from deepspeed_reading import FORMAT, assert_holds, differing, read
from deepspeed_writer import merged, two_groups, write_zero2, write_zero3


def test_latest_decides_between_tags_and_any_tag_is_allowed(tmp_path: Path) -> None:
    old, new = two_groups(), [{n: t + 1 for n, t in g.items()} for g in two_groups()]
    write_zero2(tmp_path, old, 2, tag="best so far")
    write_zero2(tmp_path, new, 2, tag="global_step8", model={"global_steps": 8})
    assert_holds(read(tmp_path), merged(new))
    assert_holds(read(tmp_path / "best so far"), merged(old))
    assert {location.path.name for location in FORMAT.find(tmp_path)} == {"best so far", "global_step8"}
    assert locate(tmp_path).path.name == "global_step8"


def test_a_tag_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    write_zero2(tmp_path, two_groups(), 2)
    for tag in ("global_step9", "../" + tmp_path.name + "/global_step7", "", "."):
        (tmp_path / "latest").write_text(tag)
        with pytest.raises(IncompleteCheckpointError, match="global_step7"):
            read(tmp_path)


def test_a_folder_without_latest_is_found_by_its_tag(tmp_path: Path) -> None:
    save = tmp_path / "epoch=1-step=20187.ckpt"
    write_zero2(save, two_groups(), 11, tag="checkpoint", latest=False)
    location = locate(tmp_path)
    assert location.path == save / "checkpoint"
    assert location.global_step == 20187
    assert_holds(FORMAT.read(location, ReadOptions()), merged(two_groups()))


def test_lightning_folders_say_that_their_names_are_wrapped(tmp_path: Path) -> None:
    write_zero2(tmp_path, two_groups(), 2, model={"pytorch-lightning_version": "2.6"})
    assert read(tmp_path).wrapped


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder = write_zero2(tmp_path / "save", two_groups(), 2)
    path = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.rename(tmp_path / "elsewhere.pt")
    path.symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(CheckpointError, match="leads out"):
        read(tmp_path / "save")


def test_the_copy_beside_a_trainers_folder_proves_zero_3(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save = tmp_path / "checkpoint-7"
    groups = two_groups()
    write_zero3(save, groups, 2)
    copies = {name: tensor.bfloat16() for name, tensor in merged(groups).items()}
    copies["norm.weight"] = copies["norm.weight"] * 2
    save_file(copies, save / "model.safetensors")
    (save / "config.json").write_text('{"model_type": "llama"}')
    assert read(save).equal == ()  # no trainer_state.json: it may be any model
    (save / "trainer_state.json").write_text("{}")
    location = locate(save)
    manifest = FORMAT.read(location, ReadOptions())
    assert (location.layout, manifest.layout) == ("deepspeed", "deepspeed")
    assert differing(manifest) == ["norm.weight"]
    assert manifest.config_dir == save


def test_a_trainers_folder_whose_latest_is_not_written_yet_is_no_hugging_face_model(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save = tmp_path / "checkpoint-7"
    write_zero3(save, two_groups(), 2)
    (save / "latest").unlink()
    save_file({"w": torch.ones(2)}, save / "model.safetensors")
    location = locate(save)
    assert location.layout == "deepspeed"
    assert FORMAT.check(location).state == "in-progress"
