"""The second readers of DeepSpeed join model-parallel ranks, experts, pipelines and universal folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from ckptflow.convert import convert
from ckptflow.errors import InconsistentCheckpointError
from ckptflow.request import ConvertRequest
from ckptflow.validate.reread.base import UncoveredError
from ckptflow.validate.reread.deepspeed import StatesRereader
from ckptflow.validate.reread.deepspeed_cut import CutRereader
from ckptflow.validate.verify import verify
from deepspeed_parallel_writer import (
    DENSE,
    expert_weights,
    write_expert_files,
    write_experts,
    write_pipeline,
    write_universal,
)
from deepspeed_reading import assert_reads, open_states
from deepspeed_writer import model_states, parameters, write_zero2
from validation import CONFIG, check_named, flip_bit, llama_shapes

ROW = (".o_proj.weight", ".down_proj.weight")
COPIED = ("embed_tokens.weight", "norm.weight")
INFO = {
    "parameter_with_row_parallelism_patterns": [
        r"^model\.layers\.\d+\.self_attn\.o_proj\.weight$",
        r"^model\.layers\.\d+\.mlp\.down_proj\.weight$",
    ],
    "tp_replicated_parameter_patterns": [
        r"^model\.embed_tokens\.weight$",
        r"^model\.layers\.\d+\.input_layernorm\.weight$",
        r"^model\.layers\.\d+\.post_attention_layernorm\.weight$",
        r"^model\.norm\.weight$",
    ],
}


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("experts", [{0: 4}, {0: 4, 1: 8}])
def test_experts_are_found_under_their_global_numbers(tmp_path: Path, ep: int, experts: dict[int, int]) -> None:
    values = write_experts(tmp_path, experts, world=4, ep=ep)
    assert_reads(open_states(tmp_path / "t"), values)


def test_experts_without_zero_are_whole(tmp_path: Path) -> None:
    dense, experts = parameters(DENSE), expert_weights({0: 4})
    path = tmp_path / "mp_rank_00_model_states.pt"
    model_states(path, dense, None, world=1, stage=0, num_experts=[4], optimizer={"state": {}})
    write_expert_files(tmp_path, experts, {0: 4})
    assert_reads(open_states(tmp_path), {**dense, **experts})


def test_masters_without_names_are_not_covered(tmp_path: Path) -> None:
    copies = {name: tensor.bfloat16() for name, tensor in parameters(DENSE).items()}
    path = tmp_path / "mp_rank_00_model_states.pt"
    for optimizer in ({"fp32_groups": [list(parameters(DENSE).values())]}, None):
        model_states(path, copies, None, world=1, stage=0, optimizer=optimizer)
        with pytest.raises(UncoveredError, match="no names"):
            open_states(tmp_path)


@pytest.mark.parametrize("zero", [True, False])
def test_the_layers_of_all_stages_are_read(tmp_path: Path, zero: bool) -> None:
    values = write_pipeline(tmp_path, zero=zero)
    assert_reads(open_states(tmp_path / "t"), values)


@pytest.mark.parametrize("flat", [True, False])
def test_each_parameter_of_a_universal_folder_is_read(tmp_path: Path, flat: bool) -> None:
    values = parameters({"w": (4, 5), "b": (3,), "deep.w": (2, 3, 4)})
    frozen = parameters({"frozen.weight": (5, 7)}) if flat else {}
    folder = write_universal(tmp_path, values, flat=flat, frozen=frozen)
    assert_reads(open_states(folder), {**values, **frozen})


def llama_values() -> dict[str, Tensor]:
    return parameters(llama_shapes())


def part(name: str, tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """What one tensor-parallel rank holds, all of it where it is not cut."""
    if name.endswith(COPIED) or "layernorm" in name:
        return tensor
    return tensor.tensor_split(ranks, 1 if name.endswith(ROW) else 0)[rank].contiguous()


def write_cut(save: Path, values: dict[str, Tensor], ranks: int, info: object = INFO) -> Path:
    """ZeRO 2 of tensor-parallel ranks, and the model's config.json."""
    for rank in range(ranks):
        mine = {name: part(name, tensor, rank, ranks) for name, tensor in values.items()}
        model = {"mp_world_size": ranks, "universal_checkpoint_info": info}
        write_zero2(save, [mine], 2, mp=rank, model=model)
    (save / "config.json").write_text(json.dumps(CONFIG))
    return save / "global_step7"


@pytest.mark.parametrize("ranks", [2, 3])
def test_tensor_parallel_parts_make_up_the_shapes_of_the_config(tmp_path: Path, ranks: int) -> None:
    values = llama_values()
    assert_reads(open_states(write_cut(tmp_path, values, ranks), tmp_path), values)


def test_replicas_that_differ_are_told(tmp_path: Path) -> None:
    values = llama_values()
    folder = write_cut(tmp_path, values, 2)
    other = {name: part(name, tensor, 1, 2) for name, tensor in values.items()}
    other["model.norm.weight"] = other["model.norm.weight"] + 1
    write_zero2(tmp_path, [other], 2, mp=1, model={"mp_world_size": 2, "universal_checkpoint_info": INFO})
    with pytest.raises(InconsistentCheckpointError, match=r"model\.norm\.weight"):
        open_states(folder, tmp_path).read("model.norm.weight", (0,), (4,))


def test_parts_of_several_pieces_and_parts_without_a_config_are_not_covered(tmp_path: Path) -> None:
    box = {"shape": [1, 4], "source": [0, [4, 1]], "dest": [0, [4, 1]]}
    fused = {"logical_shape": [12, 4], "ranks": {0: {"shard_shape": [2, 4], "pieces": [box, box]}}}
    info = {**INFO, "affine_map": {"version": 1, "params": {r"^qkv\.weight$": fused}}}
    with pytest.raises(UncoveredError, match="several pieces"):
        open_states(write_cut(tmp_path, llama_values(), 2, info), tmp_path)
    with pytest.raises(UncoveredError, match=r"config\.json"):
        open_states(tmp_path / "global_step7")


@pytest.mark.parametrize(
    ("write", "how"),
    [
        (lambda save: write_experts(save, {0: 4}, world=4, ep=2), StatesRereader.how),
        (lambda save: write_pipeline(save, zero=True), StatesRereader.how),
        (lambda save: write_universal(save, parameters({"w": (4, 5)}), flat=True), StatesRereader.how),
        (lambda save: write_cut(save, llama_values(), 2), CutRereader.how),
    ],
    ids=["experts", "pipeline", "universal", "tensor parallel"],
)
def test_one_other_element_is_found(tmp_path: Path, write: Callable[[Path], object], how: str) -> None:
    save = tmp_path / "save"
    write(save)
    convert(ConvertRequest(path=save, out=tmp_path / "out", dtype="source"))
    check = check_named(verify(tmp_path / "out", against=save), "values")
    assert (check.status, check.figures["source read through"]) == ("passed", how)
    (weights,) = (tmp_path / "out").glob("*.safetensors")
    flip_bit(weights, -1)
    check = check_named(verify(tmp_path / "out", against=save), "values")
    assert (check.status, check.figures["differing elements"]) == ("failed", 1)
