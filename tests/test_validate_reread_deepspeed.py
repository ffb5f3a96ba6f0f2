"""The second reader of DeepSpeed takes flat vectors apart right, and refuses those whose order it is not sure of."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptflow.convert import convert
from ckptflow.request import ConvertRequest
from ckptflow.validate.report import Check
from ckptflow.validate.reread import pieces
from ckptflow.validate.reread.base import UncoveredError
from ckptflow.validate.reread.deepspeed import StatesRereader
from ckptflow.validate.reread.deepspeed_cut import CutRereader
from ckptflow.validate.reread.torch_stubs import load_deepspeed_file
from ckptflow.validate.verify import verify
from deepspeed_reading import FIXTURES, assert_reads, open_states
from deepspeed_writer import (
    merged,
    optim_states,
    parameters,
    partitions,
    two_groups,
    write_zero2,
    write_zero3,
)


def compared(source: Path, out: Path) -> Check:
    """The check of the values of a conversion that was made before."""
    (check,) = (check for check in verify(out, against=source).checks if check.name == "values")
    return check


def rewrite(path: Path, **changed: object) -> None:
    torch.save({**torch.load(path, weights_only=True), **changed}, path)


@pytest.mark.parametrize("world", [1, 3, 5])
@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_partitions_of_zero_2_are_put_one_after_another(tmp_path: Path, world: int, lean: bool, recorded: bool) -> None:
    folder = write_zero2(tmp_path, two_groups(), world, lean=lean, recorded=recorded)
    reader = open_states(folder)
    assert_reads(reader, merged(two_groups()))
    assert reader.shape("other") is None


@pytest.mark.parametrize("world", [1, 3, 5])
@pytest.mark.parametrize("subgroup", [1, 4, 10**9])
def test_cuts_of_zero_3_are_taken_out_of_all_flat_groups(tmp_path: Path, world: int, subgroup: int) -> None:
    frozen = {name: t.bfloat16() for name, t in parameters({"frozen.weight": (5, 7), "frozen.bias": (3,)}).items()}
    buffer = {"running": torch.arange(3)}
    folder = write_zero3(tmp_path, two_groups(), world, frozen=frozen, subgroup=subgroup, module=buffer)
    assert_reads(open_states(folder), {**merged(two_groups()), **frozen, **buffer})


@pytest.mark.parametrize("write", [write_zero2, write_zero3])
def test_any_box_is_read(tmp_path: Path, write: Callable[..., Path]) -> None:
    values = parameters({"v": (5,), "w": (3, 3, 4)})
    reader = open_states(write(tmp_path, [values], 3))
    spans = [[(low, high - low) for low in range(n) for high in range(low + 1, n + 1)] for n in (3, 3, 4)]
    for spanned in product(*spans):
        offsets, sizes = (tuple(span[i] for span in spanned) for i in (0, 1))
        window = tuple(slice(low, low + size) for low, size in spanned)
        assert torch.equal(reader.read("w", offsets, sizes), values["w"][window]), spanned


def test_ranks_without_elements_are_passed_over(tmp_path: Path) -> None:
    few = [parameters({"w": (3,), "v": (1, 1)})]
    assert_reads(open_states(write_zero2(tmp_path / "2", few, 8)), few[0])
    assert_reads(open_states(write_zero3(tmp_path / "3", few, 8)), few[0])


def test_padding_that_bf16_optimizer_keeps_is_passed_over(tmp_path: Path) -> None:
    groups = two_groups()
    folder = write_zero2(tmp_path, groups, 3, lean=False)
    for rank, path in enumerate(sorted(folder.glob("*optim_states.pt"))):
        told = [sum(map(len, slices)) - used for slices, used in (partitions(group, 3) for group in groups)]
        paddings = told if rank == 2 else [0, 0]
        optim_states(path, rank, groups, world=3, lean=False, group_paddings=paddings)
    assert_reads(open_states(folder), merged(groups))


def test_buffers_ties_and_frozen_weights_of_zero_2_are_read(tmp_path: Path) -> None:
    frozen, buffer = torch.randn(2, 3).bfloat16(), torch.arange(4)
    copies = {n: t.bfloat16() for n, t in merged(two_groups()).items()}
    tied = {"head.weight": copies["embed.weight"]}
    model = {
        "shared_params": {"head.weight": "embed.weight"},
        "frozen_param_shapes": {"frozen.weight": (2, 3)},
        "frozen_param_fragments": {"frozen.weight": frozen},
        "buffer_names": ["running"],
    }
    module = {**copies, **tied, "running": buffer, "frozen.weight": frozen}
    folder = write_zero2(tmp_path, two_groups(), 3, module=module, model=model)
    masters = merged(two_groups())
    expected = {**masters, "head.weight": masters["embed.weight"], "running": buffer, "frozen.weight": frozen}
    assert_reads(open_states(folder), expected)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"model": {"ds_config": {"zero_optimization": {"round_robin_gradients": True}}}}, "round_robin_gradients"),
        ({"model": {"ds_config": "ds_config.json"}, "recorded": False}, "nothing tells the order"),
        ({"recorded_as": [dict(reversed(group.items())) for group in two_groups()]}, "another order"),
        ({"param_alignment_paddings": [[0, 4], []]}, "padding between"),
        ({"partition_count": [3, 2]}, "share"),
        ({"partition_count": [3, 1]}, "hold less"),
        ({"model": {"param_shapes": None}}, "without param_shapes"),
        ({"cut": 9}, "hold less"),
    ],
)
def test_what_is_not_covered_is_named(tmp_path: Path, how: dict[str, Any], message: str) -> None:
    folder = write_zero2(tmp_path, two_groups(), 3, **how)
    with pytest.raises(UncoveredError, match=message):
        open_states(folder)


def test_the_recorded_places_tell_the_order_where_no_config_does(tmp_path: Path) -> None:
    folder = write_zero2(tmp_path, two_groups(), 3, model={"ds_config": "ds_config.json"})
    assert_reads(open_states(folder), merged(two_groups()))


def test_ranks_that_are_not_there_are_named(tmp_path: Path) -> None:
    folder = write_zero2(tmp_path, two_groups(), 3)
    (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(UncoveredError, match=r"ranks \[0, 2\]"):
        open_states(folder)


def test_flat_groups_of_another_size_are_not_covered(tmp_path: Path) -> None:
    folder = write_zero3(tmp_path, [parameters({"w": (4, 5)})], 3)
    for path in folder.glob("*model_states.pt"):
        rewrite(path, param_shapes=[{"w": torch.Size((4, 4))}])
    with pytest.raises(UncoveredError, match="more or less"):
        open_states(folder)


def test_frozen_weights_without_all_fragments_are_not_covered(tmp_path: Path) -> None:
    folder = write_zero3(tmp_path, two_groups(), 3, frozen={"frozen.weight": torch.ones(5, 7)})
    rewrite(folder / "zero_pp_rank_1_mp_rank_00_model_states.pt", frozen_param_fragments={})
    with pytest.raises(UncoveredError, match="fragments"):
        open_states(folder)


class Opener:
    def __reduce__(self) -> tuple[object, ...]:
        return open, ("pwned", "w")


def test_code_in_a_file_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, how in (("model", {"model": {"client": Opener()}}), ("optim", {"client": Opener()})):
        folder = write_zero2(tmp_path / name, two_groups(), 2, **how)
        with pytest.raises(Exception, match="Weights only load failed"):
            open_states(folder)
    assert not (tmp_path / "pwned").exists()


def test_loading_a_file_leaves_torchs_own_allow_list_as_it_was(tmp_path: Path) -> None:
    folder = write_zero2(tmp_path, two_groups(), 1)
    before = torch.serialization.get_safe_globals()
    load_deepspeed_file(folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert set(torch.serialization.get_safe_globals()) == set(before)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dtype", ["source", "bfloat16"])
def test_a_conversion_is_compared_through_the_second_reader(tmp_path: Path, stage: int, dtype: str) -> None:
    (write_zero2 if stage == 2 else write_zero3)(tmp_path / "save", two_groups(), 3)
    convert(ConvertRequest(path=tmp_path / "save", out=tmp_path / "out", dtype=dtype))
    check = compared(tmp_path / "save", tmp_path / "out")
    assert (check.status, check.figures["tensors compared"]) == ("passed", len(merged(two_groups())))
    assert check.figures["source read through"] == StatesRereader.how


@pytest.mark.parametrize("stage", [2, 3])
def test_one_other_element_of_one_master_is_found(tmp_path: Path, stage: int) -> None:
    write = write_zero2 if stage == 2 else write_zero3
    write(tmp_path / "save", two_groups(), 3)
    convert(ConvertRequest(path=tmp_path / "save", out=tmp_path / "out", dtype="source"))
    groups = two_groups()
    groups[0]["layer.weight"][3, 1, 2] *= 1 + 2**-23
    write(tmp_path / "save", groups, 3)
    check = compared(tmp_path / "save", tmp_path / "out")
    assert (check.status, check.figures["differing elements"]) == ("failed", 1)
    assert "layer.weight: 1 of 30 elements differ, first at [3, 1, 2]" in check.detail


def test_where_the_order_is_not_sure_the_manifest_proves_and_a_note_says_why(tmp_path: Path) -> None:
    values = parameters({"a": (4, 4), "b": (4, 5), "c": (3,)})
    rounds = {name: values[name] for name in ("a", "c", "b")}
    settings = {"ds_config": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}}
    write_zero2(tmp_path / "save", [rounds], 2, model=settings, recorded_as=[values])
    convert(ConvertRequest(path=tmp_path / "save", out=tmp_path / "out"))
    check = compared(tmp_path / "save", tmp_path / "out")
    assert check.status == "passed"
    how = str(check.figures["source read through"])
    assert how.startswith(f"{pieces.HOW} (no second reader for DeepSpeed's round_robin_gradients")


def test_the_tag_that_is_converted_is_the_one_that_is_read(tmp_path: Path) -> None:
    newer = parameters({"w": (6, 5)}, seed=2)
    write_zero2(tmp_path / "save", [parameters({"w": (6, 5)})], 3, tag="global_step6")
    write_zero2(tmp_path / "save", [newer], 2, tag="global_step8")
    for tag in ("global_step6", None):
        source = tmp_path / "save" / tag if tag else tmp_path / "save"
        convert(ConvertRequest(path=source, out=tmp_path / f"out-{tag}", dtype="source"))
        check = compared(source, tmp_path / f"out-{tag}")
        assert (check.status, check.figures["source read through"]) == ("passed", StatesRereader.how)
    assert torch.equal(load_file(tmp_path / "out-None" / "model.safetensors")["w"], newer["w"])


@pytest.mark.parametrize("name", FIXTURES)
def test_real_states_equal_the_masters_of_the_running_engine(fixtures_dir: Path, name: str) -> None:
    (latest,) = (fixtures_dir / name / "input").rglob("latest*")
    assert_reads(
        open_states(latest.parent / latest.read_text(), fixtures_dir / name / "input"),
        load_file(fixtures_dir / name / "expected.safetensors"),
    )


@pytest.mark.parametrize("name", FIXTURES)
def test_real_folders_are_compared_through_the_second_reader(fixtures_dir: Path, name: str, tmp_path: Path) -> None:
    source = fixtures_dir / name / "input" / ("checkpoint-10" if name.startswith("trainer") else "")
    convert(ConvertRequest(path=source, out=tmp_path / "out", dtype="source"))
    how = CutRereader.how if "autotp" in name else StatesRereader.how
    check = compared(source, tmp_path / "out")
    assert (check.status, check.figures["source read through"]) == ("passed", how)
