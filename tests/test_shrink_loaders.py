"""The frameworks' own loaders read a shrunk checkpoint as before; each skips where its framework is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptflow.shrink import shrink_tree

torch = pytest.importorskip("torch")

DEEPSPEED = ["ds-z1-bf16-w2", "ds-z2-bf16-w2-tied", "ds-z2-fp32-w3-pad", "ds-z3-bf16-w2", "trainer-ds-z2-w2"]
MEGATRON = ["meg_dist_verl_tp2_pp1_qwen2", "meg_dist_lm_tp2_padvocab_llama"]

pytestmark = pytest.mark.filterwarnings("ignore")


def bloat(value: object) -> object:
    """The same object, each tensor a view on a larger storage."""
    if isinstance(value, torch.Tensor):
        margin = torch.zeros(3_000, dtype=value.dtype)
        return torch.cat([margin, value.flatten(), margin])[3_000 : 3_000 + value.numel()].view(value.shape)
    if isinstance(value, dict):
        for key in list(value):
            value[key] = bloat(value[key])
    elif isinstance(value, list):
        value[:] = map(bloat, value)
    elif type(value) is tuple:
        return tuple(map(bloat, value))
    return value


def bloat_and_shrink(source: Path, target: Path, pattern: str) -> None:
    """A copy of which each file was bloated and shrunk again."""
    shutil.copytree(source, target)
    files = list(target.rglob(pattern))
    assert files
    for path in files:
        torch.save(bloat(torch.load(path, weights_only=True)), path)
    before = sum(path.stat().st_size for path in files)
    report = shrink_tree(target)
    assert report.failures == ()
    assert sum(path.stat().st_size for path in files) < before


@pytest.fixture
def deepspeed_globals() -> Iterator[None]:
    """Lets torch load what DeepSpeed puts beside the tensors."""
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address]):
        yield


@pytest.mark.usefixtures("deepspeed_globals")
@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_gathers_the_same_weights(fixtures_dir: Path, tmp_path: Path, name: str) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as gather

    source, copy = fixtures_dir / name / "input", tmp_path / "copy"
    place = next(source.rglob("latest")).parent.relative_to(source)
    bloat_and_shrink(source, copy, "*_states.pt")
    expected, found = gather(str(source / place)), gather(str(copy / place))
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert found[key].equal(tensor), key


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_reads_the_same_common_state(fixtures_dir: Path, tmp_path: Path, name: str) -> None:
    dist_checkpointing = pytest.importorskip("megatron.core.dist_checkpointing")
    clean, copy = tmp_path / "clean", tmp_path / "copy"
    shutil.copytree(fixtures_dir / name / "input", clean)
    common = next(clean.rglob("common.pt"))
    common.chmod(0o600)
    torch.save(torch.load(common, weights_only=True) | {"random_state": torch.arange(9)}, common)
    bloat_and_shrink(clean, copy, "common.pt")
    place = common.parent.relative_to(clean)
    expected = dist_checkpointing.load_common_state_dict(str(clean / place))
    assert "random_state" in expected
    assert repr(dist_checkpointing.load_common_state_dict(str(copy / place))) == repr(expected)
