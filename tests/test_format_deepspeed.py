"""DeepSpeed folders, written with torch.save in DeepSpeed's structures and read back bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptflow.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    InconsistentCheckpointError,
    UnsupportedCheckpointError,
)
from ckptflow.formats.base import ReadOptions
from ckptflow.formats.registry import locate
from deepspeed_reading import FIXTURES, FORMAT, assert_holds, differing, read
from deepspeed_writer import (
    ODD,
    merged,
    model_states,
    optim_states,
    parameters,
    partitions,
    two_groups,
    write_zero2,
    write_zero3,
)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_zero_2_groups_are_joined_over_ranks(tmp_path: Path, world: int, lean: bool, recorded: bool) -> None:
    groups = two_groups()
    write_zero2(tmp_path, groups, world, lean=lean, recorded=recorded)
    manifest = read(tmp_path)
    assert_holds(manifest, merged(groups))
    assert {check.fqn for check in manifest.equal} == set(merged(groups))
    assert differing(manifest) == []
    assert (manifest.global_step, manifest.world_size) == (7, world)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("subgroup", [1, 4, 10**9])
def test_zero_3_parameters_are_joined_over_ranks_and_subgroups(tmp_path: Path, world: int, subgroup: int) -> None:
    groups = two_groups()
    frozen = {name: t.bfloat16() for name, t in parameters({"frozen.weight": (5, 7), "frozen.bias": (3,)}).items()}
    write_zero3(tmp_path, groups, world, frozen=frozen, subgroup=subgroup)
    assert_holds(read(tmp_path), {**frozen, **merged(groups)})


@pytest.mark.parametrize(("dtype", "prefix"), [(torch.float16, ""), (torch.bfloat16, "bf16_"), (torch.float32, "")])
def test_masters_must_round_to_the_copies(tmp_path: Path, dtype: torch.dtype, prefix: str) -> None:
    groups = two_groups()
    module = {name: tensor.to(dtype) for name, tensor in merged(groups).items()}
    module["layer.weight"] = module["layer.weight"] * 2
    write_zero2(tmp_path, groups, 2, dtype=dtype, prefix=prefix, module=module)
    assert differing(read(tmp_path)) == ["layer.weight"]


def test_the_optimizers_moments_are_left_out_with_their_bytes(tmp_path: Path) -> None:
    groups = two_groups()
    write_zero2(tmp_path, groups, 3)
    manifest = read(tmp_path)
    left_out = {entry.name: entry for entry in manifest.left_out}
    elements = sum(t.numel() for t in merged(groups).values())
    assert left_out["optimizer_state_dict"].nbytes == 4 * elements + 3 * 2 * 4  # exp_avg, and a step a group and rank
    assert left_out["tokens_seen"].reason == "client state of the trainer"


def test_bf16_optimizer_files_without_a_stage_are_read(tmp_path: Path) -> None:
    groups = two_groups()
    folder = write_zero2(tmp_path, groups, 2, model={"frozen_param_shapes": None, "frozen_param_fragments": None})
    for path in folder.glob("*optim_states.pt"):
        state = torch.load(path, weights_only=False, pickle_module=_Pickle)
        del state["optimizer_state_dict"]["zero_stage"], state["optimizer_state_dict"]["loss_scaler"]
        del state["optimizer_state_dict"]["param_slice_mappings"]
        torch.save(state, path)
    assert_holds(read(tmp_path), merged(groups))


def test_padding_that_bf16_optimizer_tells_and_keeps_is_no_part_of_the_parameters(tmp_path: Path) -> None:
    groups = two_groups()
    folder = write_zero2(tmp_path, groups, 3, lean=False)
    for rank, path in enumerate(sorted(folder.glob("*optim_states.pt"))):
        paddings = [partitions(group, 3) for group in groups]
        told = [sum(map(len, slices)) - used if rank == 2 else 0 for slices, used in paddings]
        assert rank < 2 or any(told)
        optim_states(path, rank, groups, world=3, lean=False, group_paddings=told)
    assert_holds(read(tmp_path), merged(groups))


class _Pickle:
    """Loads our own files without DeepSpeed."""

    __name__ = "pickle"
    import pickle

    load = pickle.load

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            if module.startswith("deepspeed"):
                return type(name, (int if name == "ZeroStageEnum" else object,), {})
            return super().find_class(module, name)


def test_padding_between_parameters_follows_the_recorded_fragments(tmp_path: Path) -> None:
    values = parameters({"offset": (1,), "weight": (4, 5), "bias": (3,)})
    holes = {"hole.0": torch.full((7,), 1e9), "hole.1": torch.full((4,), 1e9)}
    padded = {
        "offset": values["offset"],
        "hole.0": holes["hole.0"],
        "weight": values["weight"],
        "hole.1": holes["hole.1"],
        "bias": values["bias"],
    }
    copies = {n: t.bfloat16() for n, t in values.items()}
    folder = write_zero2(tmp_path, [padded], 2, module=copies, param_alignment_paddings=[[7, 4, 0]])
    model_states(folder / "mp_rank_00_model_states.pt", copies, [values], world=2, stage=2)
    manifest = read(tmp_path)
    assert_holds(manifest, values)
    assert differing(manifest) == []


def test_shared_parameters_are_ties(tmp_path: Path) -> None:
    groups = two_groups()
    values = merged(groups)
    module = {**{n: t.bfloat16() for n, t in values.items()}}
    module["head.weight"] = module["embed.weight"]
    write_zero2(tmp_path, groups, 2, module=module, model={"shared_params": {"head.weight": "embed.weight"}})
    manifest = read(tmp_path)
    assert manifest.ties == {"head.weight": "embed.weight"}
    assert_holds(manifest, values)
    assert differing(manifest) == []


def test_an_alias_that_no_record_names_is_found_by_its_storage(tmp_path: Path) -> None:
    groups = two_groups()
    embed = merged(groups)["embed.weight"].bfloat16()
    module = {"head.weight": embed, **{n: t.bfloat16() for n, t in merged(groups).items()}, "embed.weight": embed}
    write_zero2(tmp_path, groups, 2, module=module)
    assert read(tmp_path).ties == {"head.weight": "embed.weight"}


def test_a_shared_parameter_without_its_owner_is_refused(tmp_path: Path) -> None:
    write_zero2(tmp_path, two_groups(), 2, model={"shared_params": {"head.weight": "elsewhere.weight"}})
    with pytest.raises(InconsistentCheckpointError, match="owner"):
        read(tmp_path)


def test_buffers_and_frozen_weights_come_from_the_module_where_nothing_else_has_them(tmp_path: Path) -> None:
    groups = two_groups()
    extra = {"running": torch.arange(3), "frozen.weight": torch.randn(2, 3).bfloat16()}
    module = {**{n: t.bfloat16() for n, t in merged(groups).items()}, **extra}
    write_zero2(tmp_path, groups, 2, module=module, model={"buffer_names": ["running"], "frozen_param_shapes": None})
    assert_holds(read(tmp_path), {**merged(groups), **extra})


@pytest.mark.parametrize("excluded", [True, False])
def test_a_save_without_frozen_weights_says_so(tmp_path: Path, excluded: bool) -> None:
    model = {"frozen_param_shapes": None, "frozen_param_fragments": None} if excluded else {}
    write_zero2(tmp_path, two_groups(), 2, model=model)
    assert any("exclude_frozen_parameters" in note for note in read(tmp_path).notes) is excluded


def test_frozen_weights_of_zero_2_are_whole(tmp_path: Path) -> None:
    groups = two_groups()
    frozen = torch.randn(2, 3).bfloat16()
    write_zero2(
        tmp_path,
        groups,
        2,
        module={**{n: t.bfloat16() for n, t in merged(groups).items()}, "frozen.weight": frozen},
        model={"frozen_param_shapes": {"frozen.weight": (2, 3)}, "frozen_param_fragments": {"frozen.weight": frozen}},
    )
    assert_holds(read(tmp_path), {**merged(groups), "frozen.weight": frozen})


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"frozen_param_shapes": {"lost.weight": (4, 4)}},
        {"frozen_param_shapes": {"lost.weight": (4, 4)}, "frozen_param_fragments": {"lost.weight": torch.empty(0)}},
    ],
)
def test_frozen_weights_that_were_saved_empty_are_named(tmp_path: Path, model: dict[str, object]) -> None:
    write_zero3(tmp_path, two_groups(), 2, module={"lost.weight": torch.empty(0)}, **model)
    with pytest.raises(IncompleteCheckpointError, match=r"lost\.weight"):
        read(tmp_path)


@pytest.mark.parametrize("quantized", [True, False])
def test_frozen_weights_that_zero_pp_quantized_are_refused(tmp_path: Path, quantized: bool) -> None:
    frozen = {"frozen.weight": torch.arange(36, dtype=torch.int8).reshape(4, 9)}
    config = {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": quantized}}
    write_zero3(tmp_path, two_groups(), 2, frozen=frozen, ds_config=config)
    if not quantized:
        assert_holds(read(tmp_path), {**frozen, **merged(two_groups())})
        return
    with pytest.raises(UnsupportedCheckpointError, match=r"quantized"):
        read(tmp_path)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    folder = write_zero2(tmp_path, two_groups(), 12)
    (folder / "bf16_zero_pp_rank_11_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(IncompleteCheckpointError, match="ranks 11"):
        read(tmp_path)
    [location] = FORMAT.find(tmp_path)
    assert FORMAT.check(location).state == "in-progress"


def test_a_missing_model_file_of_zero_3_is_named(tmp_path: Path) -> None:
    folder = write_zero3(tmp_path, two_groups(), 3)
    (folder / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(IncompleteCheckpointError, match="model states of 1 of 3"):
        read(tmp_path)


def test_files_of_a_wider_run_are_foreign(tmp_path: Path) -> None:
    folder = write_zero2(tmp_path, two_groups(), 2)
    optim_states(folder / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt", 2, two_groups(), world=4)
    with pytest.raises(InconsistentCheckpointError, match="bf16_zero_pp_rank_2"):
        read(tmp_path)


def test_a_rank_of_a_run_of_another_width_is_refused(tmp_path: Path) -> None:
    folder = write_zero2(tmp_path, two_groups(), 3)
    optim_states(folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", 1, two_groups(), world=4)
    with pytest.raises(InconsistentCheckpointError, match="partition_count"):
        read(tmp_path)


def test_one_rank_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = write_zero2(tmp_path, two_groups(), 2)
    shutil.copy(
        folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    )
    with pytest.raises(InconsistentCheckpointError, match="same rank"):
        read(tmp_path)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_short_slice_is_refused(tmp_path: Path, rank: int) -> None:
    groups = [parameters({"w": (50, 3)})]
    folder = write_zero2(tmp_path, groups, 3)
    optim_states(folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", rank, groups, world=3, cut=5)
    with pytest.raises(InconsistentCheckpointError, match=r"slice"):
        read(tmp_path)


def test_a_group_that_is_much_longer_than_its_parameters_is_refused(tmp_path: Path) -> None:
    folder = write_zero2(tmp_path, [parameters({"w": (60, 3)})], 2, recorded=False)
    shorter = parameters({"w": (50, 3)})
    copies = {n: t.bfloat16() for n, t in shorter.items()}
    model_states(folder / "mp_rank_00_model_states.pt", copies, [shorter], world=2, stage=2)
    with pytest.raises(InconsistentCheckpointError, match="don't hold"):
        read(tmp_path)


def test_ranks_at_different_optimizer_steps_are_refused(tmp_path: Path) -> None:
    folder = write_zero2(tmp_path, two_groups(), 2)
    optim_states(folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", 1, two_groups(), world=2, step=6)
    with pytest.raises(InconsistentCheckpointError, match="optimizer step"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("other", "message"),
    [({"stage": 1}, "zero_stage"), ({"ds_version": "0.14.4"}, "ds_version"), ({"lr": 0.2}, "learning rates")],
)
def test_ranks_of_other_runs_at_the_same_step_are_refused(tmp_path: Path, other: dict[str, Any], message: str) -> None:
    folder = write_zero2(tmp_path, two_groups(), 2)
    optim_states(folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", 1, two_groups(), world=2, **other)
    with pytest.raises(InconsistentCheckpointError, match=message):
        read(tmp_path)


def test_model_files_of_different_steps_are_refused(tmp_path: Path) -> None:
    folder = write_zero3(tmp_path, two_groups(), 2)
    other = write_zero3(tmp_path / "other", two_groups(), 2, global_steps=6)
    shutil.copy(
        other / "zero_pp_rank_1_mp_rank_00_model_states.pt", folder / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    )
    with pytest.raises(InconsistentCheckpointError, match="global_steps"):
        read(tmp_path)


def test_names_in_another_order_than_the_optimizer_recorded_are_refused(tmp_path: Path) -> None:
    values = parameters({"a": (4, 4), "b": (4, 4)})
    folder = write_zero2(tmp_path, [values], 2)
    swapped = {"b": values["b"], "a": values["a"]}
    copies = {n: t.bfloat16() for n, t in values.items()}
    model_states(folder / "mp_rank_00_model_states.pt", copies, [swapped], world=2, stage=2)
    with pytest.raises(InconsistentCheckpointError, match="recorded another place"):
        read(tmp_path)


def test_round_robin_gradients_record_fragments_in_another_order_than_the_vectors(tmp_path: Path) -> None:
    values = parameters({"a": (4, 4), "b": (4, 5), "c": (3,)})
    rounds = {name: values[name] for name in ("a", "c", "b")}
    settings = {"ds_config": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}}
    write_zero2(tmp_path, [rounds], 2, model=settings, recorded_as=[values])
    manifest = read(tmp_path)
    assert_holds(manifest, values)
    assert {check.fqn for check in manifest.equal} == set(values)
    assert differing(manifest) == []


def test_every_cut_file_is_refused(tmp_path: Path) -> None:
    folder = write_zero2(tmp_path, two_groups(), 2)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for size in (0, 10, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:size])
            with pytest.raises(CheckpointError):
                read(tmp_path)
        path.write_bytes(whole)
    assert_holds(read(tmp_path), merged(two_groups()))


def test_zero_2_without_its_optimizer_files_is_incomplete(tmp_path: Path) -> None:
    folder = write_zero2(tmp_path, two_groups(), 2)
    for path in folder.glob("*optim_states.pt"):
        path.unlink()
    with pytest.raises(IncompleteCheckpointError, match="optimizer states are missing"):
        read(tmp_path)


def write_stage_0(save: Path, module: Mapping[str, Tensor], **optimizer: object) -> None:
    state = {"state": {}, "param_groups": [{"params": list(range(len(module)))}], **optimizer}
    model_states(save / "t" / "mp_rank_00_model_states.pt", module, None, world=2, stage=0, optimizer=state)
    (save / "latest").write_text("t")


def test_stage_0_of_an_fp32_run_is_the_module(tmp_path: Path) -> None:
    values = parameters(ODD)
    write_stage_0(tmp_path, values)
    assert_holds(read(tmp_path), values)
    assert read(tmp_path).world_size == 2


@pytest.mark.parametrize("flat", [True, False])
def test_masters_of_stage_0_get_the_names_of_the_module(tmp_path: Path, flat: bool) -> None:
    values = parameters(ODD)
    module = {name: tensor.half() for name, tensor in values.items()}
    module["head.weight"] = module["embed.weight"]
    if flat:
        write_stage_0(tmp_path, module, fp32_groups_flat=[torch.cat([t.reshape(-1) for t in values.values()])])
    else:
        matrices, vectors = [t for t in values.values() if t.ndim > 1], [t for t in values.values() if t.ndim < 2]
        write_stage_0(tmp_path, module, fp32_groups=[matrices, vectors])
    manifest = read(tmp_path)
    assert_holds(manifest, values)
    assert manifest.ties == {"head.weight": "embed.weight"}
    assert len(manifest.equal) == len(values)
    assert differing(manifest) == []


def test_masters_that_could_be_two_parameters_are_not_used(tmp_path: Path) -> None:
    values = parameters({"a": (3, 3), "b": (3, 3), "c": (3, 3)})
    module = {name: tensor.half() for name, tensor in values.items()}
    write_stage_0(tmp_path, module, fp32_groups=[[values["b"]], [values["a"], values["c"]]])
    manifest = read(tmp_path)
    assert_holds(manifest, module)
    assert any("2 of them could be a" in note for note in manifest.notes)


def test_a_master_without_its_parameter_is_refused(tmp_path: Path) -> None:
    values = parameters(ODD)
    module = {name: tensor.half() for name, tensor in values.items() if name != "layer.bias"}
    write_stage_0(tmp_path, module, fp32_groups=[list(values.values())])
    with pytest.raises(InconsistentCheckpointError, match="not in `module`"):
        read(tmp_path)


def test_mics_is_refused_by_name(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}
    write_zero3(tmp_path, two_groups(), 2, ds_config=config)
    with pytest.raises(UnsupportedCheckpointError, match="MiCS"):
        read(tmp_path)


@pytest.mark.parametrize("fixture", FIXTURES)
def test_folders_that_deepspeed_wrote_hold_the_expected_bits(fixtures_dir: Path, fixture: str) -> None:
    from safetensors.torch import load_file

    location = locate(fixtures_dir / fixture / "input")
    manifest = FORMAT.read(location, ReadOptions())
    expected = load_file(fixtures_dir / fixture / "expected.safetensors")
    for alias, owner in manifest.ties.items():
        assert torch.equal(expected.pop(alias), expected[owner])
    assert_holds(manifest, expected)
    assert differing(manifest) == []
    assert FORMAT.check(location).state == "complete"


@pytest.mark.parametrize(
    ("fixture", "message"),
    [
        ("bad-ds-latest-missing-dir", "global_step3"),
        ("bad-ds-missing-rank", "1 of 3"),
        ("bad-ds-rank-size-mismatch", "slice of rank 1"),
    ],
)
def test_broken_folders_are_refused(fixtures_dir: Path, fixture: str, message: str) -> None:
    location = locate(fixtures_dir / fixture / "input")
    with pytest.raises(CheckpointError, match=message):
        FORMAT.read(location, ReadOptions())
    assert FORMAT.check(location).state == "incomplete"
