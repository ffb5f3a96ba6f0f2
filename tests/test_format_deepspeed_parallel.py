"""DeepSpeed folders of several model-parallel ranks, of experts and of pipelines, and universal checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptflow.errors import IncompleteCheckpointError, InconsistentCheckpointError, UnsupportedCheckpointError
from deepspeed_parallel_writer import (
    DENSE,
    INFO,
    LAYERS,
    MODEL,
    cut,
    expert_weights,
    write_expert_files,
    write_experts,
    write_pipeline,
    write_tensor_parallel,
    write_universal,
)
from deepspeed_reading import assert_holds, differing, read
from deepspeed_writer import model_states, parameters, write_zero2


@pytest.mark.parametrize("dp", [1, 3])
def test_tensor_parallel_ranks_are_joined_by_the_patterns(tmp_path: Path, dp: int) -> None:
    values = parameters(MODEL)
    write_tensor_parallel(tmp_path, values, dp, INFO)
    manifest = read(tmp_path)
    assert_holds(manifest, values)
    assert differing(manifest) == []
    assert manifest.world_size == 2 * dp


def test_padded_vocabulary_rows_are_cut_off(tmp_path: Path) -> None:
    values = parameters(MODEL)
    padded = {**values, "head.weight": torch.cat([values["head.weight"], torch.zeros(2, 4)])}
    write_tensor_parallel(tmp_path, padded, 1, INFO)
    assert_holds(read(tmp_path), values)


def test_replicas_that_differ_are_found(tmp_path: Path) -> None:
    values = parameters(MODEL)
    write_tensor_parallel(tmp_path, values, 1, INFO)
    other = {name: cut(name, tensor, 1) for name, tensor in values.items()} | {"norm.weight": torch.ones(4)}
    model = {"mp_world_size": 2, "universal_checkpoint_info": INFO}
    write_zero2(tmp_path, [other], 1, mp=1, model=model)
    assert differing(read(tmp_path)) == ["norm.weight"]


def affine_entry(shape: list[int], rows: list[list[int]]) -> dict[str, object]:
    """Boxes of whole rows: for each rank, the row ranges of the logical tensor that it holds one after another."""
    ranks = {}
    width = shape[1]
    for rank, ranges in enumerate(rows):
        pieces, at = [], 0
        for begin, end in zip(ranges[::2], ranges[1::2], strict=True):
            pieces.append(
                {"shape": [end - begin, width], "source": [begin * width, [width, 1]], "dest": [at * width, [width, 1]]}
            )
            at += end - begin
        ranks[rank] = {"shard_shape": [at, width], "pieces": pieces}
    return {"logical_shape": shape, "ranks": ranks}


def test_a_fused_parameter_is_joined_by_its_boxes(tmp_path: Path) -> None:
    values = parameters({"qkv.weight": (12, 4)})
    q, k, v = values["qkv.weight"].chunk(3)
    entry = affine_entry([12, 4], [[0, 2, 4, 6, 8, 10], [2, 4, 6, 8, 10, 12]])
    info = {**INFO, "affine_map": {"version": 1, "params": {r"^qkv\.weight$": entry}}}
    for rank in range(2):
        mine = {"qkv.weight": torch.cat([t.chunk(2)[rank] for t in (q, k, v)])}
        write_zero2(tmp_path, [mine], 2, mp=rank, model={"mp_world_size": 2, "universal_checkpoint_info": info})
    assert_holds(read(tmp_path), values)


@pytest.mark.parametrize(
    "info",
    [
        None,
        {"universal_checkpoint_version": 0.2},
        {**INFO, "parameter_with_sub_params": [{"patterns": ["q"]}]},
        {**INFO, "parameter_with_row_parallelism_patterns": ["^(a+)+$"]},
    ],
)
def test_tensor_parallel_folders_that_don_t_tell_enough_are_refused_by_name(tmp_path: Path, info: object) -> None:
    write_tensor_parallel(tmp_path, parameters(MODEL), 1, info)
    with pytest.raises(UnsupportedCheckpointError, match="tensor-parallel"):
        read(tmp_path)


def test_half_of_a_tensor_parallel_model_is_incomplete(tmp_path: Path) -> None:
    folder = write_tensor_parallel(tmp_path, parameters(MODEL), 1, INFO)
    for path in folder.glob("*mp_rank_01*"):
        path.unlink()
    with pytest.raises(IncompleteCheckpointError, match="mp_world_size"):
        read(tmp_path)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_experts_are_joined_under_their_global_numbers(tmp_path: Path, ep: int) -> None:
    values = write_experts(tmp_path, {0: 4}, world=4, ep=ep)
    manifest = read(tmp_path)
    assert_holds(manifest, values)
    assert differing(manifest) == []
    assert len(manifest.equal) == len(values)
    (tmp_path / "t" / "layer_0_expert_3_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(IncompleteCheckpointError, match="expert"):
        read(tmp_path)


def test_layers_of_fewer_experts_count_their_own(tmp_path: Path) -> None:
    values = write_experts(tmp_path, {0: 4, 1: 2}, world=2, ep=2)
    manifest = read(tmp_path)
    assert_holds(manifest, values)
    assert differing(manifest) == []


def test_experts_without_zero_are_read_in_the_compute_dtype(tmp_path: Path) -> None:
    dense, experts = parameters(DENSE), expert_weights({0: 4})
    copies = {n: t.bfloat16() for n, t in {**dense, **experts}.items()}
    folder = tmp_path / "t"
    model_states(
        folder / "mp_rank_00_model_states.pt",
        {n: copies[n] for n in dense},
        None,
        world=1,
        stage=0,
        num_experts=[4],
        optimizer={"fp32_groups": [list(dense.values()), list(experts.values())]},
    )
    write_expert_files(folder, copies, {0: 4})
    (tmp_path / "latest").write_text("t")
    manifest = read(tmp_path)
    assert_holds(manifest, copies)
    assert any("experts" in note for note in manifest.notes)


def test_a_model_of_experts_whose_files_are_gone_is_incomplete(tmp_path: Path) -> None:
    dense = parameters(DENSE)
    write_zero2(tmp_path, [dense], 1, model={"num_experts": [4, 4]})
    with pytest.raises(IncompleteCheckpointError, match="expert"):
        read(tmp_path)


def test_pipeline_layers_are_joined_without_zero(tmp_path: Path) -> None:
    values = write_pipeline(tmp_path, zero=False)
    assert_holds(read(tmp_path), values)


@pytest.mark.parametrize("named_by_shapes", [True, False], ids=["zero 1", "bf16 optimizer"])
def test_pipeline_masters_are_joined_within_their_stage(tmp_path: Path, named_by_shapes: bool) -> None:
    values = write_pipeline(tmp_path, zero=True, dtype=torch.bfloat16, named_by_shapes=named_by_shapes)
    manifest = read(tmp_path)
    assert_holds(manifest, values)
    assert len(manifest.equal) == len(values)
    assert differing(manifest) == []


@pytest.mark.parametrize(("zero", "named_by_shapes"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_missing_layer_of_a_pipeline_is_noticed(
    tmp_path: Path, zero: bool, named_by_shapes: bool, layer: int
) -> None:
    write_pipeline(tmp_path, zero=zero, named_by_shapes=named_by_shapes)
    (tmp_path / "t" / f"layer_{layer:02d}-model_states.pt").unlink()
    with pytest.raises(IncompleteCheckpointError):
        read(tmp_path)


def test_stages_of_different_steps_are_refused(tmp_path: Path) -> None:
    write_pipeline(tmp_path, zero=False)
    path = tmp_path / "t" / "mp_rank_01_model_states.pt"
    torch.save(torch.load(path) | {"global_steps": 8}, path)
    with pytest.raises(InconsistentCheckpointError, match="disagree on global_steps"):
        read(tmp_path)


def test_a_missing_stage_of_a_pipeline_is_noticed(tmp_path: Path) -> None:
    write_pipeline(tmp_path, zero=True)
    for path in (tmp_path / "t").glob("*mp_rank_01*"):
        path.unlink()
    with pytest.raises(IncompleteCheckpointError):
        read(tmp_path)


def test_tied_layers_of_a_pipeline_are_refused_by_name(tmp_path: Path) -> None:
    write_pipeline(tmp_path, zero=False)
    first = torch.load(tmp_path / "t" / "layer_00-model_states.pt")
    torch.save(first, tmp_path / "t" / "layer_04-model_states.pt")
    with pytest.raises(UnsupportedCheckpointError, match="tied"):
        read(tmp_path)


@pytest.mark.parametrize("flat", [True, False])
def test_universal_checkpoints_are_read_name_by_name(tmp_path: Path, flat: bool) -> None:
    values = parameters(MODEL)
    folder = write_universal(tmp_path, values, flat=flat)
    manifest = read(tmp_path)
    assert_holds(manifest, values)
    assert differing(manifest) == []
    assert len(manifest.equal) == (0 if flat else len(values))
    (folder / "zero" / "o.bias" / "fp32.pt").unlink()
    with pytest.raises(IncompleteCheckpointError):
        read(tmp_path)


def test_what_zero_3_froze_lies_in_the_model_files_beside_a_universal_checkpoint(tmp_path: Path) -> None:
    values, frozen = parameters(MODEL), {"frozen.weight": torch.randn(5, 7).bfloat16()}
    folder = write_universal(tmp_path, values, flat=True, frozen=frozen)
    assert_holds(read(tmp_path), {**values, **frozen})
    (folder / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(IncompleteCheckpointError):
        read(tmp_path)


def test_buffers_of_a_universal_checkpoint_keep_their_dtype(tmp_path: Path) -> None:
    values, buffers = parameters(MODEL), {"steps": torch.arange(3)}
    write_universal(tmp_path, values, flat=False, buffers=buffers)
    assert_holds(read(tmp_path), {**values, **buffers})


def test_a_universal_parameter_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = write_universal(tmp_path, parameters(MODEL), flat=True)
    torch.save(torch.ones(23), folder / "zero" / "embed.weight" / "fp32.pt")
    with pytest.raises(InconsistentCheckpointError, match="shape"):
        read(tmp_path)


def test_a_universal_parameter_that_nothing_names_is_refused(tmp_path: Path) -> None:
    folder = write_universal(tmp_path, parameters(MODEL), flat=False)
    (folder / "zero" / "new.weight").mkdir()
    torch.save(torch.ones(2), folder / "zero" / "new.weight" / "fp32.pt")
    with pytest.raises(InconsistentCheckpointError, match=r"don't name"):
        read(tmp_path)
