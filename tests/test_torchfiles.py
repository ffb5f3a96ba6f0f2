"""Torch files of both formats, written by torch itself, read without it and compared bit for bit."""

from __future__ import annotations

import argparse
import collections
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptflow.errors import CorruptFileError
from ckptflow.torchfiles import (
    LazyStorage,
    LazyTensor,
    MetaTensor,
    Stub,
    TorchFile,
    open_torch_file,
    stub_name,
    stub_state,
    unsupported_tensor_kind,
)
from torch_values import assert_same, quiet_torch

torch = pytest.importorskip("torch")

pytestmark = quiet_torch


class Recipe:
    """A class that readers don't have."""

    def __init__(self, lr: float) -> None:
        self.lr = lr


@pytest.fixture(params=["zip", "legacy"])
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[object], TorchFile]:
    """Saves in one of both formats and opens again."""

    def save_and_open(value: object) -> TorchFile:
        path = tmp_path / "saved.pt"
        torch.save(value, path, _use_new_zipfile_serialization=request.param == "zip")
        opened = open_torch_file(path)
        assert opened.format == request.param
        return opened

    return save_and_open


Save = Callable[[object], TorchFile]

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64"]


class TestTensors:
    @pytest.mark.parametrize("name", DTYPES)
    def test_each_dtype_comes_back_bit_for_bit(self, save: Save, name: str) -> None:
        expected = torch.arange(-6, 6).reshape(3, 4).to(getattr(torch, name))
        assert_same(save({"w": expected}).value["w"], expected)

    @pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64"])
    def test_dtypes_without_a_storage_class_come_back_too(self, save: Save, name: str) -> None:
        expected = torch.arange(8, dtype=torch.uint8).view(getattr(torch, name))
        assert_same(save([expected]).value[0], expected)

    def test_views_keep_their_window_and_share_the_storage(self, save: Save) -> None:
        base = torch.arange(20.0).reshape(4, 5)
        opened = save({"base": base, "rows": base[1:3], "columns": base[:, :2], "transposed": base.t()})
        for name, expected in {"rows": base[1:3], "columns": base[:, :2], "transposed": base.t()}.items():
            assert_same(opened.value[name], expected)
            assert opened.value[name].storage is opened.value["base"].storage
        columns = opened.value["columns"]
        assert not columns.is_contiguous
        assert columns.nbytes == 8 * 4
        assert columns.extent_bytes == (3 * 5 + 1 + 1) * 4
        assert opened.value["rows"].is_contiguous
        assert opened.value["rows"].byte_offset == columns.storage.offset + 20
        assert len(opened.storages) == 1

    def test_tied_tensors_are_equal_and_equal_copies_are_not(self, save: Save) -> None:
        weight = torch.ones(3, 3)
        opened = save({"a": weight, "b": weight, "c": weight.clone()})
        assert opened.value["a"] == opened.value["b"]
        assert len({opened.value["a"], opened.value["b"]}) == 1
        assert opened.value["a"] != opened.value["c"]

    def test_scalars_and_empty_tensors_have_their_shapes(self, save: Save) -> None:
        opened = save({"scalar": torch.tensor(5.0), "empty": torch.empty(0, 4), "expanded": torch.ones(1).expand(6, 2)})
        assert opened.value["scalar"].shape == ()
        assert opened.value["empty"].shape == (0, 4)
        assert opened.value["empty"].extent_bytes == 0
        assert opened.value["expanded"].strides == (0, 0)
        assert_same(opened.value["scalar"], torch.tensor(5.0))

    def test_parameters_say_so(self, save: Save) -> None:
        opened = save(
            {"w": torch.nn.Parameter(torch.ones(2)), "f": torch.nn.Parameter(torch.ones(2), requires_grad=False)}
        )
        assert opened.value["w"].is_parameter
        assert opened.value["w"].requires_grad
        assert opened.value["f"].is_parameter
        assert not opened.value["f"].requires_grad

    def test_conjugate_and_negative_views_are_flagged(self, save: Save) -> None:
        value = torch.tensor([1 + 2j, 3 - 4j])
        conj = save({"conj": value.conj(), "plain": value}).value
        assert (conj["conj"].conj, conj["conj"].neg) == (True, False)
        assert not conj["plain"].conj
        assert save(value.conj().imag).value.neg

    def test_sparse_quantized_and_meta_tensors_load_without_values(self, save: Save) -> None:
        opened = save(
            {
                "sparse": torch.eye(3).to_sparse(),
                "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
                "meta": torch.empty(2, 3, device="meta"),
                "plain": torch.ones(1),
            }
        )
        assert stub_name(opened.value["sparse"]) == "torch._utils._rebuild_sparse_tensor"
        assert unsupported_tensor_kind(opened.value["sparse"]) == "sparse"
        assert unsupported_tensor_kind(opened.value["quantized"]) == "quantized"
        assert unsupported_tensor_kind(opened.value["plain"]) is None
        assert opened.value["meta"] == MetaTensor("float32", (2, 3))
        assert_same(opened.value["plain"], torch.ones(1))

    def test_tensor_subclasses_give_their_name(self, save: Save) -> None:
        opened = save(torch.ones(2).as_subclass(Marked))
        assert opened.value.subclass == f"{__name__}.Marked"

    def test_lazy_records_travel_between_processes(self, save: Save) -> None:
        opened = save({"w": torch.ones(2, 3)})
        copy = pickle.loads(pickle.dumps(opened.value["w"]))  # noqa: S301 - our own bytes
        assert (copy.shape, copy.byte_offset) == ((2, 3), opened.value["w"].byte_offset)


class Marked(torch.Tensor):
    """A subclass without data of its own."""


class TestOtherValues:
    def test_plain_values_and_containers_come_back_as_they_are(self, save: Save) -> None:
        value = {
            "step": 7,
            "lr": 1e-4,
            "names": ["a", ("b", None)],
            "flags": {True, False},
            "frozen": frozenset({1}),
            "raw": b"\x00\xff",
            "big": 2**100,
            3: "int key",
        }
        assert save(value).value == value

    def test_ordered_and_default_dicts_come_back_as_dicts(self, save: Save) -> None:
        default = collections.defaultdict(list)
        default["a"].append(1)
        opened = save([torch.nn.Linear(2, 2).state_dict(), default, collections.Counter("aab")])
        assert isinstance(opened.value[0], collections.OrderedDict)
        assert list(opened.value[0]) == ["weight", "bias"]
        assert opened.value[0]._metadata[""] == {"version": 1}
        assert opened.value[1] == {"a": [1]}
        assert opened.value[2] == {"a": 2, "b": 1}

    def test_a_namespace_and_own_classes_become_stubs_with_their_state(self, save: Save) -> None:
        opened = save({"args": argparse.Namespace(tp=2), "recipe": Recipe(0.5), "w": torch.ones(2)})
        assert stub_name(opened.value["args"]) == "argparse.Namespace"
        assert stub_state(opened.value["args"]) == {"tp": 2}
        assert isinstance(opened.value["recipe"], Stub)
        assert stub_state(opened.value["recipe"]) == {"lr": 0.5}
        assert opened.foreign_globals == (f"{__name__}.Recipe",)
        assert_same(opened.value["w"], torch.ones(2))

    @pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
    def test_a_whole_module_gives_its_parameters(self, save: Save) -> None:
        module = torch.nn.Linear(2, 3)
        opened = save(module)
        assert_same(stub_state(opened.value)["_parameters"]["weight"], module.weight.detach())

    def test_numpy_arrays_are_stubs(self, save: Save) -> None:
        numpy = pytest.importorskip("numpy")
        opened = save({"rng": numpy.random.RandomState(0).get_state(), "mean": numpy.float64(2)})
        assert opened.value["rng"][0] == "MT19937"
        assert isinstance(opened.value["rng"][1], Stub)
        assert opened.foreign_globals == ()

    def test_paths_are_texts(self, save: Save) -> None:
        assert save([Path("/data/run"), Path("a/b")]).value == ["/data/run", "a/b"]


class TestLazyTensor:
    storage = LazyStorage("f", "0", "float32", "cpu", 0, 80, None)

    @pytest.mark.parametrize(
        ("offset", "shape", "strides"),
        [
            (0, (21,), (1,)),
            (1, (20,), (1,)),
            (0, (4, 5), (6, 1)),
            (-1, (2,), (1,)),
            (0, (-1,), (1,)),
            (0, (2,), (-1,)),
            (0, (2, 2), (1,)),
            (0, (2**40, 2**40), (0, 0)),
            (0, (True,), (1,)),
            (0, (1,) * 65, (1,) * 65),
        ],
    )
    def test_a_window_outside_its_storage_is_refused(
        self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        with pytest.raises(CorruptFileError):
            LazyTensor(self.storage, "float32", offset, shape, strides)

    def test_the_whole_storage_fits(self) -> None:
        tensor = LazyTensor(self.storage, "float32", 0, (4, 5), (5, 1))
        assert (tensor.numel, tensor.nbytes, tensor.extent_bytes, tensor.is_contiguous) == (20, 80, 80, True)

    def test_an_empty_tensor_fits_anywhere(self) -> None:
        assert LazyTensor(self.storage, "float32", 30, (0, 9), (9, 1)).extent_bytes == 0


def test_reading_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, ckptflow.torchfiles; sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
