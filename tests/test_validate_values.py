"""The output is compared with its source element by element; each kind of wrong value is found and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptflow.convert import convert
from ckptflow.dtypes import DTYPES, dtype_named
from ckptflow.errors import CheckpointError
from ckptflow.fingerprint import source_file
from ckptflow.plan import LoraFold, PlannedTensor
from ckptflow.request import ConvertRequest
from ckptflow.tensors import TensorSource, whole
from ckptflow.validate.headers import read_header
from ckptflow.validate.report import Check, ValidationReport
from ckptflow.validate.reread.base import boxes, by_plain_name
from ckptflow.validate.reread.pieces import read_box
from ckptflow.validate.values import Comparison, compare_box, compare_folded
from ckptflow.validate.verify import VerifyOptions, verify
from validation import check_named, llama_weights, write_model, write_record

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
UP_PROJ = "model.layers.0.mlp.up_proj.weight"
GATE_PROJ = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Hugging Face directory in float32, without a config."""
    directory = tmp_path / "source"
    directory.mkdir()
    save_file(llama_weights(torch.float32), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture
def out(source: Path, tmp_path: Path) -> Path:
    """Its conversion to bfloat16."""
    convert(ConvertRequest(path=source, out=tmp_path / "out"))
    return tmp_path / "out"


def values(report: ValidationReport) -> Check:
    return check_named(report, "values")


def rewrite(out: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change tensors of an output and make its record agree, so that only the comparison can notice."""
    fingerprint = json.loads((out / "ckptflow.json").read_text())["fingerprint"]
    weights = load_file(out / "model.safetensors")
    change(weights)
    save_file({k: t.contiguous() for k, t in weights.items()}, out / "model.safetensors", metadata={"format": "pt"})
    write_record(out, weights, dict.fromkeys(weights, "model.safetensors"))
    record = json.loads((out / "ckptflow.json").read_text())
    (out / "ckptflow.json").write_text(json.dumps({**record, "fingerprint": fingerprint}))


def test_a_conversion_equals_its_source(source: Path, out: Path) -> None:
    report = verify(out, against=source)
    assert report.passed, report.failures
    assert report.tensors_compared == len(llama_weights())
    assert report.elements_compared == sum(t.numel() for t in llama_weights().values())
    assert report.differing_elements == 0


def test_the_rounding_errors_are_those_of_bfloat16(source: Path, out: Path) -> None:
    report = verify(out, against=source)
    histogram = report.rounding_histogram
    assert histogram is not None
    assert histogram.edges[-1] == 2**-8
    assert sum(histogram.counts) + histogram.exact == histogram.sampled == report.elements_compared
    weights = llama_weights(torch.float32)
    largest = max(float((t - t.bfloat16().float()).abs().max()) for t in weights.values())
    assert values(report).figures["largest rounding error"] == largest


def one_bit(weights: dict[str, torch.Tensor]) -> None:
    weights[Q_PROJ].view(torch.int16)[3, 5] ^= 1


def two_rows(weights: dict[str, torch.Tensor]) -> None:
    weights[Q_PROJ][[0, 1]] = weights[Q_PROJ][[1, 0]]


def heads_permuted(weights: dict[str, torch.Tensor]) -> None:
    weights[Q_PROJ] = weights[Q_PROJ].view(4, 2, 2, 16).transpose(1, 2).reshape(16, 16)


def scaled(weights: dict[str, torch.Tensor]) -> None:
    weights[Q_PROJ] *= 2


def other_layer(weights: dict[str, torch.Tensor]) -> None:
    weights[Q_PROJ] = weights[Q_PROJ.replace("0", "1")].clone()


def zero_tail(weights: dict[str, torch.Tensor]) -> None:
    weights[Q_PROJ][-1] = 0


def not_a_number(weights: dict[str, torch.Tensor]) -> None:
    weights[Q_PROJ][0, 0] = float("nan")


def rounded_down(weights: dict[str, torch.Tensor]) -> None:
    """What cutting the low 16 bits gives instead of rounding."""
    exact = llama_weights(torch.float32)[Q_PROJ]
    weights[Q_PROJ] = (exact.view(torch.int32) & -65536).view(torch.float32).bfloat16()


WRONG = [one_bit, two_rows, heads_permuted, scaled, other_layer, zero_tail, not_a_number, rounded_down]


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_wrong_values_of_one_tensor_are_found(
    source: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    before = load_file(out / "model.safetensors")[Q_PROJ]
    rewrite(out, change)
    after = load_file(out / "model.safetensors")[Q_PROJ]
    report = verify(out, against=source)
    changed = int((before.view(torch.int16) != after.view(torch.int16)).sum())
    assert report.differing_elements == changed > 0
    assert values(report).detail.startswith(f"{Q_PROJ}: {changed} of 256 elements differ, first at [")


def test_the_first_wrong_element_is_named(source: Path, out: Path) -> None:
    rewrite(out, one_bit)
    assert "first at [3, 5]: " in values(verify(out, against=source)).detail


def test_two_tensors_under_each_others_names_are_found(source: Path, out: Path) -> None:
    def swap(weights: dict[str, torch.Tensor]) -> None:
        weights[UP_PROJ], weights[GATE_PROJ] = weights[GATE_PROJ], weights[UP_PROJ]

    rewrite(out, swap)
    detail = values(verify(out, against=source)).detail
    assert UP_PROJ in detail
    assert GATE_PROJ in detail


def test_a_missing_tensor_and_an_extra_one_are_named(source: Path, out: Path) -> None:
    def rename(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.bias"] = weights.pop("model.norm.weight")

    rewrite(out, rename)
    detail = values(verify(out, against=source)).detail
    assert "not in the output: model.norm.weight" in detail
    assert "not in the source: lm_head.bias" in detail


def test_another_dtype_or_shape_than_planned_is_named(source: Path, out: Path) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[Q_PROJ] = weights[Q_PROJ].float()
        weights[UP_PROJ] = weights[UP_PROJ].T

    rewrite(out, change)
    detail = values(verify(out, against=source)).detail
    assert f"{Q_PROJ} is float32 [16, 16], not bfloat16 [16, 16]" in detail
    assert f"{UP_PROJ} is bfloat16 [16, 24], not bfloat16 [24, 16]" in detail


def test_a_source_that_changed_since_is_found(source: Path, out: Path) -> None:
    weights = llama_weights(torch.float32)
    weights[Q_PROJ][0] += 1
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    report = verify(out, against=source)
    assert not report.passed
    assert report.differing_elements == 16


def test_a_reference_model_is_compared_by_name_in_the_outputs_dtype(out: Path, tmp_path: Path) -> None:
    reference = write_model(tmp_path / "reference", llama_weights(torch.float32), config=None, files=3)
    report = verify(out, against=reference)
    assert report.passed, report.failures
    assert report.tensors_compared == len(llama_weights())
    assert "reference model" in str(values(report).figures["source read through"])


def test_a_reference_model_with_other_weights_fails(out: Path, tmp_path: Path) -> None:
    weights = llama_weights(torch.float32)
    weights["model.norm.weight"] += 1
    reference = write_model(tmp_path / "reference", weights, config=None)
    assert values(verify(out, against=reference)).detail.startswith("model.norm.weight: 16 of 16 elements differ")


def test_a_checkpoint_that_is_none_is_refused(out: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError):
        verify(out, against=tmp_path / "empty")


def test_a_small_memory_budget_gives_the_same_answer(source: Path, out: Path) -> None:
    rewrite(out, one_bit)
    small = verify(out, against=source, options=VerifyOptions(memory_budget_bytes=1))
    assert (small.differing_elements, small.elements_compared) == (1, verify(out, against=source).elements_compared)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (4, 3, 5), (2, 0, 3), (1, 40)])
@pytest.mark.parametrize("most", [1, 4, 15, 1000])
def test_boxes_tile_a_shape_in_order(shape: tuple[int, ...], most: int) -> None:
    numbers = torch.arange(prod(shape)).reshape(shape)
    found = [numbers[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] for box in boxes(shape, most)]
    assert all(0 < part.numel() <= most for part in found)
    joined = torch.cat([part.flatten() for part in found]) if found else torch.empty(0, dtype=torch.long)
    assert torch.equal(joined, numbers.flatten())


@pytest.mark.parametrize("name", [n for n in DTYPES if n not in ("complex128", "float8_e8m0fnu")])
def test_every_dtype_is_read_back_from_its_pieces(tmp_path: Path, name: str) -> None:
    tensor = torch.arange(24).reshape(4, 6).to(getattr(torch, name))
    save_file({"w": tensor}, tmp_path / "w.safetensors")
    stored = read_header(tmp_path / "w.safetensors")["w"]
    source = whole(source_file(stored.file), stored.begin, (6, 4), dtype_named(name), strides=(1, 6))
    box = read_box("w", source, (1, 1), (4, 2))
    assert torch.equal(box.view(torch.uint8), tensor.T[1:5, 1:3].contiguous().view(torch.uint8))


def test_nan_equals_nan_but_nothing_else() -> None:
    found = torch.tensor([float("nan"), 1.0], dtype=torch.bfloat16)
    wanted = torch.tensor([float("nan"), float("nan")])
    wanted[:1].view(torch.int32)[0] |= 1  # another NaN, as another kernel may give it
    result = compare_box(found, wanted, (5,), 1)
    assert (result.differing, result.first) == (1, "first at [6]: 1.0 instead of nan")


def test_what_is_compared_is_left_as_it_is() -> None:
    source = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    found = source.float()
    assert compare_box(found, source, (0,), 1).differing == 0
    assert found.tolist() == [1.0, 2.0]
    assert source.tolist() == [1.0, 2.0]


def test_a_name_that_lost_its_wrappers_is_found_unless_it_is_ambiguous() -> None:
    look_up = by_plain_name(
        ["_fsdp_wrapped_module.a", "module.b", "pretrained_model.c", "d._orig_mod.e", "b2", "module.b2"]
    )
    assert [look_up(n) for n in ("a", "b", "c", "d.e", "b2", "x")] == [
        "_fsdp_wrapped_module.a",
        "module.b",
        "pretrained_model.c",
        "d._orig_mod.e",
        "b2",
        None,
    ]


class TestFoldedAdapters:
    """A fold can't be bit for bit, but a wrong one must not be within the tolerance."""

    ROWS, COLUMNS, RANK, SCALE = 12, 20, 4, 2.0

    def planned(self, tmp_path: Path, dora: bool, transposed: bool) -> tuple[PlannedTensor, torch.Tensor, torch.Tensor]:
        """The plan, the base, and the fold as PEFT computes it, in float32."""
        generator = torch.Generator().manual_seed(3)
        out, inner = (self.COLUMNS, self.ROWS) if transposed else (self.ROWS, self.COLUMNS)
        parts = {
            "base": torch.randn(self.ROWS, self.COLUMNS, generator=generator),
            "a": torch.randn(self.RANK, inner, generator=generator),
            "b": torch.randn(out, self.RANK, generator=generator),
            "magnitude": torch.rand(out, generator=generator) + 0.5,
        }
        save_file(parts, tmp_path / "parts.safetensors")
        stored = read_header(tmp_path / "parts.safetensors")
        sources: dict[str, TensorSource] = {
            name: whole(source_file(t.file), t.begin, t.shape, t.dtype) for name, t in stored.items()
        }
        fold = LoraFold(
            a=sources["a"],
            b=sources["b"],
            scale=self.SCALE,
            magnitude=sources["magnitude"] if dora else None,
            transposed=transposed,
        )
        plan = PlannedTensor(
            fqn="w", source=sources["base"], dtype=DTYPES["bfloat16"], source_fqns=("base",), fold=fold
        )
        weight = parts["base"].T if transposed else parts["base"]
        merged = weight + self.SCALE * (parts["b"] @ parts["a"])
        if dora:
            merged = parts["magnitude"][:, None] * merged / merged.norm(dim=1, keepdim=True)
        return plan, parts["base"], merged.T.contiguous() if transposed else merged

    def compare(self, plan: PlannedTensor, base: torch.Tensor, found: torch.Tensor) -> Comparison:
        def read(tensor: torch.Tensor) -> Callable[[tuple[int, ...], tuple[int, ...]], torch.Tensor]:
            return lambda o, n: tensor[tuple(slice(at, at + size) for at, size in zip(o, n, strict=True))]

        result = Comparison()
        compare_folded(result, plan, read(found), read(base), most_elements=50)
        return result

    @pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
    @pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_the_right_fold_passes(self, tmp_path: Path, dora: bool, transposed: bool, dtype: torch.dtype) -> None:
        plan, base, merged = self.planned(tmp_path, dora, transposed)
        result = self.compare(plan, base, merged.to(dtype))
        assert (result.problems, result.folded, result.elements) == ([], 1, base.numel())

    @pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
    def test_a_base_without_its_adapter_fails(self, tmp_path: Path, dora: bool) -> None:
        plan, base, _ = self.planned(tmp_path, dora, transposed=False)
        assert self.compare(plan, base, base.bfloat16()).differing > base.numel() // 2

    def test_half_the_scale_fails(self, tmp_path: Path) -> None:
        plan, base, merged = self.planned(tmp_path, dora=False, transposed=False)
        assert self.compare(plan, base, ((base + merged) / 2).bfloat16()).differing > base.numel() // 2

    def test_an_element_two_steps_off_fails_and_is_named(self, tmp_path: Path) -> None:
        plan, base, merged = self.planned(tmp_path, dora=False, transposed=False)
        found = merged.bfloat16()
        found.view(torch.int16)[7, 3] += 2
        result = self.compare(plan, base, found)
        assert result.differing == 1
        assert "first in row 7" in result.problems[0]

    def test_nan_fails(self, tmp_path: Path) -> None:
        plan, base, merged = self.planned(tmp_path, dora=False, transposed=False)
        found = merged.bfloat16()
        found[0, 0] = float("nan")
        assert self.compare(plan, base, found).differing == 1
