"""The second readers of Megatron's two formats find every row where Megatron put it, by a way of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptflow.convert import convert
from ckptflow.formats.base import ReadOptions
from ckptflow.formats.registry import locate, read
from ckptflow.request import ConvertRequest
from ckptflow.validate.report import Check
from ckptflow.validate.reread.dcp import DcpRereader
from ckptflow.validate.reread.megatron import MegatronRereader, reread_ranks, reread_torch_dist
from ckptflow.validate.verify import VerifyOptions, verify
from megatron_dist_writer import dist_tensors, save
from megatron_legacy_writer import write
from megatron_models import CONFIGS, Tensors, config_of, hf_model
from validation import check_named, read_whole

DIST = "torch.load of every DCP entry, rows found by cutting row numbers"
LEGACY = "torch.load of every rank's file, rows found by cutting row numbers"


def assert_gives(reader: MegatronRereader, hf: Tensors) -> None:
    for fqn, wanted in hf.items():
        assert reader.shape(fqn) == tuple(wanted.shape), fqn
        assert torch.equal(read_whole(reader, fqn, most_elements=20), wanted), fqn
    assert reader.shape("model.layers.40.input_layernorm.weight") is None


@pytest.mark.parametrize("one_by_one", [False, True], ids=["stacked", "singletons"])
@pytest.mark.parametrize("family", CONFIGS)
def test_torch_dist_is_taken_apart_in_every_family(tmp_path: Path, family: str, one_by_one: bool) -> None:
    config = config_of(family)
    hf = hf_model(config)
    out = save(dist_tensors(hf, config, one_by_one), tmp_path / "iter_0000010", config)
    stored = DcpRereader(out, {path.name: path for path in out.iterdir()})
    assert_gives(reread_torch_dist(stored, config), hf)


def ranks_of(out: Path, config: dict[str, Any]) -> MegatronRereader:
    manifest = read(locate(out), ReadOptions(config_dir=out.parent / "config"))
    assert manifest.mesh is not None
    return reread_ranks([Path(file.path) for file in manifest.files], manifest.mesh, config)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 2, 1)], ids=["one rank", "tp 2 pp 2"])
@pytest.mark.parametrize("family", CONFIGS)
def test_ranks_are_put_together_in_every_family(
    tmp_path: Path, family: str, grid: tuple[int, int, int], fused: bool
) -> None:
    config = config_of(family)
    out, hf = write(tmp_path, config, grid, fused=fused)
    assert_gives(ranks_of(out, config), hf)


@pytest.mark.parametrize("style", ["sequential", "te", "grouped"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_ranks_hold_experts_in_any_of_three_ways(tmp_path: Path, family: str, style: str) -> None:
    config = config_of(family)
    out, hf = write(tmp_path, config, (2, 2, 2), experts=style)
    assert_gives(ranks_of(out, config), hf)


def test_layers_are_numbered_through_virtual_stages(tmp_path: Path) -> None:
    config = config_of("qwen2", layers=8)
    out, hf = write(tmp_path, config, (2, 2, 1), stages=2)
    assert_gives(ranks_of(out, config), hf)


def proof_of(source: Path, out: Path, config_dir: Path | None) -> Check:
    convert(ConvertRequest(path=source, out=out, config_dir=config_dir))
    report = verify(out, against=source, options=VerifyOptions(config_dir=config_dir))
    assert report.passed, report.failures
    return check_named(report, "values")


@pytest.mark.parametrize("name", ["meg_dist_verl_moe_mixtral", "meg_dist_verl_tp2_pp1_qwen2"])
def test_real_torch_dist_is_proven_by_the_second_reader(fixtures_dir: Path, name: str, tmp_path: Path) -> None:
    assert proof_of(fixtures_dir / name / "input", tmp_path / "out", None).figures["source read through"] == DIST


@pytest.mark.parametrize("name", ["meg_legacy_tp2_pp2_llama", "meg_legacy_tp2_qwen2_bf16", "meg_oldstyle_tp2_llama"])
def test_real_ranks_are_proven_by_the_second_reader(fixtures_dir: Path, name: str, tmp_path: Path) -> None:
    source = fixtures_dir / name / "input" / "iter_0000010"
    proof = proof_of(source, tmp_path / "out", fixtures_dir / name / "hf_config")
    assert proof.figures["source read through"] == LEGACY


def test_gates_and_ups_in_the_order_of_the_ranks_are_found_by_the_proof(
    fixtures_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptflow.tensors import concatenate
    from ckptflow.transforms import megatron_merge

    def in_rank_order(sources: list[Any], dim: int) -> Any:  # what concatenating the ranks' own parts gives
        half = len(sources) // 2
        pairs = zip(sources[:half], sources[half:], strict=True) if len(sources) == 4 else [sources]
        return concatenate([part for pair in pairs for part in pair], dim)

    source, config_dir = fixtures_dir / "meg_legacy_tp2_pp2_llama" / "input", fixtures_dir / "meg_legacy_tp2_pp2_llama"
    with monkeypatch.context() as patch:
        patch.setattr(megatron_merge, "concatenate", in_rank_order)
        request = ConvertRequest(
            path=source / "iter_0000010", out=tmp_path / "out", config_dir=config_dir / "hf_config"
        )
        convert(request)
        report = verify(request.out, against=request.path, options=VerifyOptions(config_dir=request.config_dir))
    failed = {check.name: check.detail for check in report.failures}
    assert "gate_proj" in failed["values"]
