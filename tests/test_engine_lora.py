"""Adapters are folded into their base weights as PEFT's ``merge_and_unload`` folds them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckptflow.dtypes import DTYPES, numpy_dtype
from ckptflow.engine import EngineOptions, write_weight_file
from ckptflow.errors import UsageError, ValueRefusedError
from ckptflow.plan import LoraFold
from engine_sources import base_of, planned, random_fold, read_output, same_bits, store, weight_file

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
FLOAT32 = DTYPES["float32"]


class Tiny(torch.nn.Module):
    """One layer of each kind that PEFT folds."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.linear = torch.nn.Linear(48, 64, bias=False)
        self.conv1d = Conv1D(40, 24)  # GPT-2's layer: the weight is stored [in, out]
        self.embedding = torch.nn.Embedding(50, 16)
        self.conv2d = torch.nn.Conv2d(6, 10, 3)


def merged_by_peft(kind: str, **settings: object) -> tuple[np.ndarray, np.ndarray, LoraFoldParts]:
    """Base weight, PEFT's result, and the adapter's tensors for one layer."""
    torch.manual_seed(3)
    base = Tiny()
    config = peft.LoraConfig(r=4, lora_alpha=10, target_modules=[kind], **settings)
    model = peft.get_peft_model(base, config)
    layer = getattr(model.base_model.model, kind)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "lora" in name and "magnitude" not in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
            elif "magnitude" in name:
                parameter.mul_(1.3)
    tensors = {name: parameter.detach().numpy().copy() for name, parameter in layer.named_parameters()}
    parts = LoraFoldParts(tensors, layer.scaling["default"])
    before = layer.base_layer.weight.detach().numpy().copy()
    after = getattr(model.merge_and_unload(), kind).weight.detach().numpy().copy()
    return before, after, parts


class LoraFoldParts:
    """The arrays of one adapter, found by PEFT's names."""

    def __init__(self, tensors: dict[str, np.ndarray], scale: float) -> None:
        self.a = next(v for k, v in tensors.items() if "lora_A" in k or "lora_embedding_A" in k)
        self.b = next(v for k, v in tensors.items() if "lora_B" in k or "lora_embedding_B" in k)
        self.magnitude = next((v for k, v in tensors.items() if "magnitude" in k), None)
        self.scale = scale

    def fold(self, directory: Path, *, transposed: bool) -> LoraFold:
        magnitude = None if self.magnitude is None else store(directory / "m", self.magnitude.reshape(-1), FLOAT32)
        a, b = store(directory / "a", self.a, FLOAT32), store(directory / "b", self.b, FLOAT32)
        return LoraFold(a=a, b=b, scale=self.scale, magnitude=magnitude, transposed=transposed)


@pytest.mark.filterwarnings("ignore:::peft")
@pytest.mark.filterwarnings("ignore:::torch")
@pytest.mark.parametrize("kind", ["linear", "conv1d", "embedding", "conv2d"])
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_a_fold_gives_what_peft_merges(tmp_path: Path, kind: str, settings: dict[str, object]) -> None:
    if kind == "conv1d":
        settings = {**settings, "fan_in_fan_out": True}
    before, after, parts = merged_by_peft(kind, **settings)
    assert np.abs(after - before).max() > 0.05
    fold = parts.fold(tmp_path, transposed=kind in ("conv1d", "embedding"))
    file = weight_file(planned("w", store(tmp_path / "w", before, FLOAT32), fold=fold))
    write_weight_file(file, tmp_path / "out")
    np.testing.assert_allclose(read_output(tmp_path / "out")["w"], after, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_fold_has_the_same_bytes_for_any_threads_and_blocks(tmp_path: Path, dora: bool, transposed: bool) -> None:
    _, source = base_of(tmp_path, 1301, 907)
    fold = random_fold(tmp_path, 1301, 907, dora=dora, transposed=transposed)
    file = weight_file(planned("w", source, "bfloat16", fold=fold))
    options = [
        EngineOptions(threads=1),
        EngineOptions(threads=2),
        EngineOptions(threads=4, memory_budget_bytes=900_000),
        EngineOptions(threads=1, memory_budget_bytes=300_000, direct_io=False),
    ]
    assert len({write_weight_file(file, tmp_path / "out", o).sha256 for o in options}) == 1


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_fold_of_many_tiles_is_that_of_the_whole_matrix(tmp_path: Path, dora: bool, transposed: bool) -> None:
    base, source = base_of(tmp_path, 1301, 907)
    fold = random_fold(tmp_path, 1301, 907, dora=dora, transposed=transposed)
    write_weight_file(weight_file(planned("w", source, fold=fold)), tmp_path / "out")
    rng = np.random.default_rng(2)
    shapes = ((8, 1301), (907, 8)) if transposed else ((8, 907), (1301, 8))
    a, b = (rng.standard_normal(shape, np.float32).astype(np.float64) for shape in shapes)
    update = 0.37 * (b @ a)
    wanted = base + (update.T if transposed else update)
    if dora:
        magnitude = rng.random(shapes[1][0], np.float32) + 1.0
        axis = 0 if transposed else 1
        wanted *= np.expand_dims(magnitude / np.linalg.norm(wanted, axis=axis), axis)
    np.testing.assert_allclose(read_output(tmp_path / "out")["w"], wanted, rtol=1e-4, atol=1e-5)


def test_a_low_precision_base_is_rounded_once(tmp_path: Path) -> None:
    base, _ = base_of(tmp_path, 60, 70)
    low = base.astype(numpy_dtype(DTYPES["bfloat16"]))
    fold = random_fold(tmp_path, 60, 70, dora=False, transposed=False)
    wide = weight_file(planned("w", store(tmp_path / "wide", low.astype(np.float32), FLOAT32), "bfloat16", fold=fold))
    narrow = weight_file(planned("w", store(tmp_path / "low", low, DTYPES["bfloat16"]), "bfloat16", fold=fold))
    write_weight_file(wide, tmp_path / "wide.out")
    write_weight_file(narrow, tmp_path / "low.out")
    assert same_bits(read_output(tmp_path / "wide.out")["w"], read_output(tmp_path / "low.out")["w"])


def test_an_adapter_of_another_base_model_is_refused(tmp_path: Path) -> None:
    _, source = base_of(tmp_path, 60, 70)
    for rows, columns, dora in ((61, 70, False), (60, 71, False)):
        fold = random_fold(tmp_path, rows, columns, dora=dora, transposed=False)
        with pytest.raises(UsageError, match="doesn't fit its base weight") as caught:
            write_weight_file(weight_file(planned("model.w", source, fold=fold)), tmp_path / "out")
        assert caught.value.tensor == "model.w"


def test_an_adapter_without_elements_is_refused(tmp_path: Path) -> None:
    _, source = base_of(tmp_path, 60, 70)
    fold = random_fold(tmp_path, 60, 70, dora=False, transposed=False)
    for shape in ((0,), (0, 70), ()):
        empty = store(tmp_path / "e", np.zeros(shape, np.float32), FLOAT32)
        with pytest.raises(UsageError, match="doesn't fit its base weight"):
            write_weight_file(
                weight_file(planned("w", source, fold=LoraFold(a=empty, b=fold.b, scale=1.0))), tmp_path / "out"
            )


def test_a_magnitude_of_another_length_is_refused(tmp_path: Path) -> None:
    _, source = base_of(tmp_path, 60, 70)
    fold = random_fold(tmp_path, 60, 70, dora=False, transposed=False)
    short = store(tmp_path / "m", np.ones(1, np.float32), FLOAT32)
    wrong = LoraFold(a=fold.a, b=fold.b, scale=1.0, magnitude=short)
    with pytest.raises(UsageError, match="magnitude vector"):
        write_weight_file(weight_file(planned("w", source, fold=wrong)), tmp_path / "out")


def test_an_adapter_that_makes_inf_is_refused(tmp_path: Path) -> None:
    _, source = base_of(tmp_path, 60, 70)
    fold = random_fold(tmp_path, 60, 70, dora=False, transposed=False)
    huge = LoraFold(a=fold.a, b=fold.b, scale=3e38)
    with pytest.raises(ValueRefusedError, match="folding an adapter gives NaN or Inf"):
        write_weight_file(weight_file(planned("w", source, fold=huge)), tmp_path / "out")


def test_an_integer_tensor_takes_no_adapter(tmp_path: Path) -> None:
    fold = random_fold(tmp_path, 4, 5, dora=False, transposed=False)
    source = store(tmp_path / "i", np.zeros((4, 5), np.int64), DTYPES["int64"])
    with pytest.raises(UsageError, match="floating-point"):
        write_weight_file(weight_file(planned("w", source, fold=fold)), tmp_path / "out")


FOLDING_RUN = """
import sys
sys.path[:0] = [sys.argv[2]]
import os
import subprocess
import sys
from pathlib import Path
from engine_sources import base_of, planned, random_fold, weight_file
from ckptflow.engine import write_weight_file
root = Path(sys.argv[1])
fold = random_fold(root, 1301, 907, 64, dora=True, transposed=False)
file = weight_file(planned("w", base_of(root, 1301, 907)[1], fold=fold))
print(write_weight_file(file, root / "out").sha256)
"""


def test_a_fold_has_the_same_bytes_for_any_number_of_blas_threads(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FOLDING_RUN, str(tmp_path), str(Path(__file__).parent / "support")]
    hashes = {
        subprocess.run(
            command, env={**os.environ, "OPENBLAS_NUM_THREADS": count}, capture_output=True, check=True, text=True
        ).stdout
        for count in ("1", "2", "4")
    }
    assert len(hashes) == 1
    assert len(hashes.pop()) == 65
