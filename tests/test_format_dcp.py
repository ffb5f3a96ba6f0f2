"""DCP directories, written by torch.distributed.checkpoint itself."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat

from ckptflow.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    IncompleteCheckpointError,
    InconsistentCheckpointError,
    UnsafeFileError,
    UnsupportedCheckpointError,
)
from ckptflow.formats.base import ReadOptions
from ckptflow.formats.dcp import DcpDirectory
from ckptflow.formats.registry import locate
from ckptflow.manifest import CheckpointManifest
from dcp_two_ranks import SHAPES, values
from reading import read_source

FORMAT = DcpDirectory()
WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(12.0).view(4, 3),
    "model.norm.weight": torch.tensor([0.5, -1.0, 2.0]),
    "lm_head.weight": torch.arange(12.0, 24.0).view(4, 3).bfloat16(),
}

RANDOM = torch.arange(50, dtype=torch.uint8)


def save(state: dict[str, Any], path: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in one process
        dcp.save(state, storage_writer=FileSystemWriter(path, **options), no_dist=True)
    return path


def optimizer(step: float, weights: dict[str, torch.Tensor] = WEIGHTS) -> dict[str, Any]:
    moments = {name: {"exp_avg": torch.ones_like(w), "step": torch.tensor(step)} for name, w in weights.items()}
    return {"state": moments, "param_groups": [{"lr": 0.1}]}


def read(path: Path) -> CheckpointManifest:
    (location,) = FORMAT.find(path)
    return FORMAT.read(location, ReadOptions())


def state_of(path: Path) -> str:
    (location,) = FORMAT.find(path)
    return FORMAT.check(location).state


def assert_weights(manifest: CheckpointManifest, expected: dict[str, torch.Tensor]) -> None:
    assert set(manifest.tensors) == set(expected)
    for name, tensor in expected.items():
        found = read_source(manifest.tensors[name])
        assert found.shape == tuple(tensor.shape)
        assert found.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()


def edit_metadata(path: Path, edit: Callable[[Any], Any]) -> None:
    """Load the trusted .metadata, change it, write it back with its old time."""
    file = path / ".metadata"
    times = file.stat().st_mtime_ns
    metadata = pickle.loads(file.read_bytes())  # noqa: S301 - this test has just written it
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata))
    os.utime(file, ns=(times, times))


@pytest.mark.parametrize(
    ("state", "left_out"),
    [
        (WEIGHTS, set()),
        ({"model": WEIGHTS, "optim": optimizer(5)}, {"optim.*"}),
        ({"app": {"model": WEIGHTS, "optim": optimizer(5)}}, {"app.optim.*"}),
        ({"state_dict": WEIGHTS, "optimizer_0": optimizer(5)}, {"optimizer_0.*"}),
        (
            {**WEIGHTS, "optimizer": optimizer(5), "train_state": {"step": torch.tensor(5)}, "dataloader": {"r": 1}},
            {"optimizer.*", "train_state.*", "dataloader.*"},
        ),
    ],
    ids=["flat", "model and optim", "app", "lightning", "torchtitan"],
)
def test_the_model_is_found_by_the_nested_paths_of_the_state_dict(
    tmp_path: Path, state: dict[str, Any], left_out: set[str]
) -> None:
    manifest = read(save(state, tmp_path / "step-5"))
    assert_weights(manifest, WEIGHTS)
    assert {entry.name for entry in manifest.left_out} == left_out
    assert state_of(tmp_path / "step-5") == "complete"


@pytest.mark.parametrize(
    ("beside", "left_out"),
    [
        ({"torch_rng_state": RANDOM, "cuda_rng": RANDOM}, {"torch_rng_state.*", "cuda_rng.*"}),
        ({"metrics": {"loss": torch.tensor(0.5)}, "sampler": {"order": RANDOM}}, {"metrics.*", "sampler.*"}),
        ({"opt": optimizer(5)}, {"opt.*"}),
        ({"trainer": {"adam": optimizer(5), "epoch": 1}}, {"trainer.adam.*", "trainer.epoch"}),
        (optimizer(5), {"state.*", "param_groups.*"}),
    ],
    ids=["random states", "metrics and sampler", "another name", "deeper", "poured out"],
)
@pytest.mark.parametrize("name", ["model", "net"])
def test_what_can_not_be_weights_does_not_compete_with_the_model(
    tmp_path: Path, name: str, beside: dict[str, Any], left_out: set[str]
) -> None:
    manifest = read(save({name: WEIGHTS, **beside}, tmp_path / "c"))
    assert_weights(manifest, WEIGHTS)
    assert {entry.name for entry in manifest.left_out} == left_out


def test_an_optimizer_s_directory_is_no_checkpoint_whatever_lies_in_it(tmp_path: Path) -> None:
    save({"model": WEIGHTS}, tmp_path / "step_5" / "model")
    save({"optim": optimizer(5)}, tmp_path / "step_5" / "optim")
    assert locate(tmp_path / "step_5").path == tmp_path / "step_5" / "model"
    save({"adam": optimizer(5)}, tmp_path / "adam")
    assert state_of(tmp_path / "adam") == "incomplete"
    with pytest.raises(UnsupportedCheckpointError, match="no model"):
        read(tmp_path / "adam")


@pytest.mark.parametrize("beside", ["lr_scheduler", "optim", "optimizer_1", "dataloader", "rng_state"])
def test_training_state_that_was_saved_beside_the_model_leaves_the_step_one_checkpoint(
    tmp_path: Path, beside: str
) -> None:
    step = tmp_path / "iter_0000010"
    save({"model_state": {"model": WEIGHTS}}, step / "model")
    save({"state": {"last_epoch": torch.tensor(3)}}, step / beside)
    assert locate(step).path == step / "model"
    save({"model": WEIGHTS}, step / "ema")
    with pytest.raises(AmbiguousCheckpointError, match="2 checkpoints"):
        locate(step)


def test_an_array_that_may_have_been_trained_does(tmp_path: Path) -> None:
    with pytest.raises(AmbiguousCheckpointError, match="log_std"):
        read(save({"model": WEIGHTS, "log_std": torch.zeros(3)}, tmp_path / "c"))


def test_an_optimizer_beside_the_model_s_own_keys_is_no_weight(tmp_path: Path) -> None:
    flat = {"state.model.norm.weight.exp_avg": torch.ones(3), "param_groups.model.norm.weight.lr": 0.1}
    assert_weights(read(save({**WEIGHTS, **flat}, tmp_path / "c")), WEIGHTS)


def test_a_list_of_the_model_s_parts_is_one_model_without_the_numbers(tmp_path: Path) -> None:
    names = list(WEIGHTS)
    parts = [{name: WEIGHTS[name] for name in some} for some in (names[:1], names[1:])]
    assert_weights(read(save({"models": parts, "optim": optimizer(5)}, tmp_path / "c")), WEIGHTS)


def test_a_list_of_models_is_ambiguous(tmp_path: Path) -> None:
    with pytest.raises(AmbiguousCheckpointError, match=r"models\.0"):
        read(save({"models": [WEIGHTS, WEIGHTS]}, tmp_path / "c"))


def test_many_files_per_rank_are_joined_and_strays_listed(tmp_path: Path) -> None:
    path = save({"model": WEIGHTS}, tmp_path / "c", single_file_per_rank=False)
    assert len(list(path.glob("*.distcp"))) == len(WEIGHTS)
    (path / "__7_0.distcp").write_bytes(b"of an older save")
    assert_weights(read(path), WEIGHTS)
    assert [entry.name for entry in read(path).left_out] == ["__7_0.distcp"]


def test_shards_of_two_ranks_are_placed_by_their_offsets(tmp_path: Path) -> None:
    out = tmp_path / "checkpoint-3"
    command = [sys.executable, str(Path(__file__).parent / "support" / "dcp_two_ranks.py")]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), str(out)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    manifest = read(out)
    assert manifest.world_size == 2
    assert_weights(manifest, {name: values(name) for name in SHAPES})


def test_optimizer_moments_are_never_read(tmp_path: Path) -> None:
    path = save({"model": WEIGHTS, "optim": optimizer(5)}, tmp_path / "c")
    metadata = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301 - this test has just written it
    times = (path / "__0_0.distcp").stat().st_mtime_ns
    with open(path / "__0_0.distcp", "r+b") as file:
        for index, info in metadata.storage_data.items():
            if index.fqn.endswith("exp_avg"):
                file.seek(info.offset)
                file.write(b"\xff" * info.length)
    os.utime(path / "__0_0.distcp", ns=(times, times))
    assert_weights(read(path), WEIGHTS)


def test_accelerate_keeps_its_optimizer_in_a_directory_that_is_no_model(tmp_path: Path) -> None:
    save({"model": WEIGHTS}, tmp_path / "pytorch_model_fsdp_0")
    save({"optimizer": optimizer(5)}, tmp_path / "optimizer_0")
    (tmp_path / "scheduler.bin").write_bytes(b"x")
    (location,) = FORMAT.find(tmp_path)
    assert location.path == tmp_path / "pytorch_model_fsdp_0"
    manifest = FORMAT.read(location, ReadOptions())
    assert_weights(manifest, WEIGHTS)
    assert {entry.name for entry in manifest.left_out} == {"optimizer_0/", "scheduler.bin"}
    assert FORMAT.find(tmp_path / "optimizer_0") == []


@pytest.mark.parametrize("inside", ["", "pytorch_model_fsdp_0"])
def test_an_adapter_s_config_beside_it_makes_no_adapter_s_directory_of_it(tmp_path: Path, inside: str) -> None:
    lora = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.ones(2, 3)}
    save({"model": {**WEIGHTS, **lora}}, tmp_path / "c" / inside)
    (tmp_path / "c" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    assert locate(tmp_path / "c").layout == "dcp"


def test_a_save_without_metadata_is_in_progress_and_refused(tmp_path: Path) -> None:
    path = save({"model": WEIGHTS}, tmp_path / "c")
    (path / ".metadata").rename(path / ".metadata.tmp")
    assert state_of(path) == "in-progress"
    with pytest.raises(IncompleteCheckpointError, match="written last"):
        read(path)


@pytest.mark.parametrize("change", [-1, 1, None], ids=["short", "long", "missing"])
def test_a_data_file_of_another_length_is_refused(tmp_path: Path, change: int | None) -> None:
    path = save({"model": WEIGHTS}, tmp_path / "c")
    file = path / "__0_0.distcp"
    if change is None:
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size + change)
    assert state_of(path) == "incomplete"
    with pytest.raises(CheckpointError):
        read(path)


def test_data_files_younger_than_metadata_belong_to_a_save_that_goes_on(tmp_path: Path) -> None:
    path = save({"model": WEIGHTS}, tmp_path / "c")
    now = (path / ".metadata").stat().st_mtime_ns
    os.utime(path / "__0_0.distcp", ns=(now, now + 60 * 10**9))
    assert state_of(path) == "in-progress"
    with pytest.raises(IncompleteCheckpointError, match="newer save"):
        read(path)


def test_metadata_of_another_step_is_refused(tmp_path: Path) -> None:
    first, second = (save({"model": WEIGHTS}, tmp_path / f"step-{n}") for n in (1, 2))
    shutil.copy(second / ".metadata", first / ".metadata")
    with pytest.raises(InconsistentCheckpointError, match="another step"):
        read(first)


def test_data_files_of_another_step_are_refused(tmp_path: Path) -> None:
    first, second = (
        save({**WEIGHTS, "train_state": {"step": torch.tensor(n)}}, tmp_path / f"step-{n}") for n in (1, 2)
    )
    shutil.copy2(first / "__0_0.distcp", second / "__0_0.distcp")
    with pytest.raises(InconsistentCheckpointError, match="another step"):
        read(second)


def test_data_files_of_different_steps_are_refused(tmp_path: Path) -> None:
    names = [f"optim.state.{name}.step" for name in list(WEIGHTS)[:2]]
    old, new = (
        save({"model": WEIGHTS, "optim": optimizer(step)}, tmp_path / str(step), single_file_per_rank=False)
        for step in (3.0, 4.0)
    )
    edit_metadata(new, lambda m: _drop(m, lambda fqn: fqn.endswith(".step") and fqn not in names))
    assert read(new).tensors
    metadata = pickle.loads((new / ".metadata").read_bytes())  # noqa: S301 - this test has just written it
    (file,) = (info.relative_path for index, info in metadata.storage_data.items() if index.fqn == names[0])
    shutil.copy2(old / file, new / file)
    with pytest.raises(InconsistentCheckpointError, match="different steps"):
        read(new)


def test_one_data_file_of_another_step_among_many_is_refused(tmp_path: Path) -> None:
    old, new = (
        save({"model": WEIGHTS, "optim": optimizer(step)}, tmp_path / str(step), single_file_per_rank=False)
        for step in (3.0, 4.0)
    )
    metadata = pickle.loads((new / ".metadata").read_bytes())  # noqa: S301 - this test has just written it
    counters = [info.relative_path for index, info in metadata.storage_data.items() if index.fqn.endswith(".step")]
    assert len(set(counters)) == len(WEIGHTS) > 2
    assert read(new).tensors
    shutil.copy2(old / counters[0], new / counters[0])
    with pytest.raises(InconsistentCheckpointError, match="different steps"):
        read(new)


def test_a_parameter_that_was_updated_less_often_is_no_other_step(tmp_path: Path) -> None:
    state = optimizer(4.0)
    state["state"]["lm_head.weight"]["step"] = torch.tensor(2.0)
    assert read(save({"model": WEIGHTS, "optim": state}, tmp_path / "c")).tensors


def _drop(metadata: Any, unwanted: Callable[[str], bool]) -> None:
    for fqn in [f for f in metadata.state_dict_metadata if unwanted(f)]:
        del metadata.state_dict_metadata[fqn]
    for index in [i for i in metadata.storage_data if unwanted(i.fqn)]:
        del metadata.storage_data[index]


def test_an_entry_that_holds_another_shape_than_the_metadata_says_is_refused(tmp_path: Path) -> None:
    save({"w": torch.zeros(2, 3), "b": torch.zeros(2)}, tmp_path / "a")
    save({"w": torch.zeros(3, 2), "b": torch.zeros(2)}, tmp_path / "b")
    shutil.copy(tmp_path / "b" / ".metadata", tmp_path / "a" / ".metadata")
    with pytest.raises(InconsistentCheckpointError, match=r"another tensor than \.metadata says"):
        read(tmp_path / "a")


@pytest.mark.parametrize("name", ["../x.distcp", "/etc/passwd", "a/../../x"])
def test_metadata_can_not_name_files_outside(tmp_path: Path, name: str) -> None:
    path = save(WEIGHTS, tmp_path / "c")

    def elsewhere(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = replace(info, relative_path=name)

    edit_metadata(path, elsewhere)
    with pytest.raises(UnsafeFileError):
        read(path)


def test_a_link_out_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    path = save(WEIGHTS, tmp_path / "c")
    (path / "__0_0.distcp").rename(tmp_path / "outside.distcp")
    (path / "__0_0.distcp").symlink_to(tmp_path / "outside.distcp")
    with pytest.raises(UnsafeFileError):
        read(path)


def test_code_in_metadata_is_not_run(tmp_path: Path) -> None:
    path = save(WEIGHTS, tmp_path / "c")

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "PWNED"),))

    (path / ".metadata").write_bytes(pickle.dumps(Payload()))
    assert state_of(path) == "incomplete"
    with pytest.raises(CheckpointError):
        read(path)
    assert not (tmp_path / "PWNED").exists()


def test_compressed_entries_are_refused_by_name(tmp_path: Path) -> None:
    path = save(WEIGHTS, tmp_path / "c")

    def compress(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = replace(info, transform_descriptors=["stream.zstd"])

    edit_metadata(path, compress)
    with pytest.raises(UnsupportedCheckpointError) as refused:
        read(path)
    assert refused.value.found == "stream.zstd"


def test_a_model_that_was_pickled_as_a_whole_is_refused_with_the_way_to_save_it(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in one process
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
        dcp.save({"model": WEIGHTS, "epoch": 1}, checkpoint_id=tmp_path / "c", planner=planner, no_dist=True)
    with pytest.raises(UnsupportedCheckpointError, match=r"model pickled as a whole(.|\n)*flatten_state_dict=True"):
        read(tmp_path / "c")


def test_two_models_are_ambiguous(tmp_path: Path) -> None:
    path = save({"policy": WEIGHTS, "critic": WEIGHTS}, tmp_path / "c")
    with pytest.raises(AmbiguousCheckpointError) as refused:
        read(path)
    assert "critic" in str(refused.value)


def test_names_behind_one_attribute_are_left_to_the_config(tmp_path: Path) -> None:
    wrapped = {f"net.{name}": tensor for name, tensor in WEIGHTS.items()}
    assert read(save({"model": wrapped, "optim": optimizer(1, wrapped)}, tmp_path / "a")).wrapped
    assert not read(save({"model": WEIGHTS}, tmp_path / "b")).wrapped
    tied = {name: tensor for name, tensor in WEIGHTS.items() if name != "lm_head.weight"}
    assert not read(save({"model": tied}, tmp_path / "c")).wrapped


def test_a_counter_beside_the_model_hides_no_wrapper(tmp_path: Path) -> None:
    average = {f"module.{name}": tensor for name, tensor in WEIGHTS.items()}
    manifest = read(save({"model": {"n_averaged": torch.tensor(3), **average}}, tmp_path / "average"))
    assert manifest.wrapped
    assert not read(save({"model": {"n_averaged": torch.tensor(3), **WEIGHTS}}, tmp_path / "plain")).wrapped


def test_a_missing_chunk_leaves_a_gap_that_is_refused(tmp_path: Path) -> None:
    path = save(WEIGHTS, tmp_path / "c")

    def grow(metadata: Any) -> None:
        metadata.state_dict_metadata["model.norm.weight"].size = torch.Size([4])

    edit_metadata(path, grow)
    with pytest.raises(InconsistentCheckpointError, match="gap"):
        read(path)


def test_data_files_in_safetensors_are_refused_by_what_they_are(tmp_path: Path) -> None:
    path = save({"model": WEIGHTS}, tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    with pytest.raises(UnsupportedCheckpointError, match=r"the data files are safetensors"):
        read(path)
    (location,) = FORMAT.find(path)
    assert "safetensors" in FORMAT.check(location).reason
