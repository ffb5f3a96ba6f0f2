"""What torch loads from a shrunk file: the same tensors, the same sharing, the same everything else."""

from __future__ import annotations

import argparse
import collections
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptflow.shrink import plan_shrink, shrink_tree
from ckptflow.torchfiles import LazyTensor, Stub, open_torch_file, stub_state

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:torch.quantize_per_tensor")


@pytest.fixture(params=["zip", "legacy"])
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[object], Path]:
    """Saves in one of both formats."""

    def save_one(value: object) -> Path:
        path = tmp_path / "saved.pt"
        torch.save(value, path, _use_new_zipfile_serialization=request.param == "zip")
        return path

    return save_one


Save = Callable[[object], Path]


def bits(tensor: object) -> object:
    """The values as bytes, in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    return plain.view(torch.uint8) if plain.numel() else plain


def assert_same(new: object, old: object) -> None:
    """Values bit for bit, and all that a tensor says of itself."""
    assert type(new) is type(old)
    assert (new.dtype, new.shape, new.stride()) == (old.dtype, old.shape, old.stride())
    assert (new.requires_grad, new.is_conj(), new.is_neg()) == (old.requires_grad, old.is_conj(), old.is_neg())
    assert bits(new).equal(bits(old))


def shrink(path: Path) -> object:
    """Shrinks one file, checks that it became smaller and that zipfile and torch like it; gives what torch loads."""
    before = path.stat().st_size
    (done,) = shrink_tree(path).files
    assert done.outcome == "shrunk", done
    assert (done.before_bytes, done.after_bytes) == (before, path.stat().st_size)
    assert done.after_bytes < before
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
    assert plan_shrink(path).rewrite is None
    return torch.load(path, weights_only=True)


DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
]
# torch writes them as bytes without a type, which it can't load from legacy files.
UNTYPED_DTYPES = ["float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64"]


class TestOneView:
    @pytest.mark.parametrize("name", DTYPES)
    def test_a_slice_of_a_large_tensor_takes_the_space_of_the_slice(self, save: Save, name: str) -> None:
        big = (torch.arange(40_000) % 251).to(torch.uint8).view(getattr(torch, name))
        path = save({"w": big[800:820]})
        assert_same(shrink(path)["w"], big[800:820])
        assert path.stat().st_size < 2_500

    @pytest.mark.parametrize("name", UNTYPED_DTYPES)
    def test_dtypes_without_a_storage_class_are_cut_at_their_elements(self, tmp_path: Path, name: str) -> None:
        big = (torch.arange(40_000) % 251).to(torch.uint8).view(getattr(torch, name))
        torch.save({"w": big[801:821], "v": big[4_003:4_004]}, tmp_path / "saved.pt")
        new = shrink(tmp_path / "saved.pt")
        assert_same(new["w"], big[801:821])
        assert_same(new["v"], big[4_003:4_004])

    def test_ten_rows_of_a_thousand_fall_from_400_kb_to_5_kb(self, save: Save) -> None:
        big = torch.randn(1000, 100)
        path = save({"w": big[:10]})
        assert path.stat().st_size > 400_000
        loaded = shrink(path)
        assert_same(loaded["w"], big[:10])
        assert loaded["w"].untyped_storage().nbytes() == 4_000
        assert path.stat().st_size < 6_000

    @pytest.mark.parametrize(
        "view",
        [
            pytest.param(lambda base: base[100:140].t(), id="transposed"),
            pytest.param(lambda base: base[7, 3:5].expand(50, 2), id="expanded"),
            pytest.param(lambda base: base[3:6, ::7], id="strided"),
            pytest.param(lambda base: base[5:9, 3:4].permute(1, 0).unsqueeze(0), id="permuted"),
            pytest.param(lambda base: base[40, 9], id="0-d"),
            pytest.param(lambda base: base[60:60], id="empty"),
            pytest.param(lambda base: base.flatten()[77:].as_strided((4, 4), (3, 2)), id="overlapping itself"),
            pytest.param(lambda base: base[11:13].view(torch.int32), id="seen as another dtype"),
        ],
    )
    def test_shape_and_strides_stay(self, save: Save, view: Callable[[object], object]) -> None:
        old = view(torch.arange(20_000.0).reshape(200, 100))
        assert_same(shrink(save([old]))[0], old)

    def test_conjugated_and_negated_views_stay_lazy(self, save: Save) -> None:
        base, other = torch.randn(4_000, dtype=torch.complex64), torch.randn(4_000, dtype=torch.complex64)
        old = {"conj": base[10:20].conj(), "neg": other.conj().imag[5:9], "both": torch._neg_view(base[15:30].conj())}
        new = shrink(save(old))
        for name, tensor in old.items():
            assert_same(new[name], tensor)

    def test_parameters_and_gradient_flags_stay(self, save: Save) -> None:
        base = torch.randn(5_000)
        old = {
            "parameter": torch.nn.Parameter(base[:10]),
            "frozen": torch.nn.Parameter(base[2_000:2_010], requires_grad=False),
            "leaf": base[4_000:4_010].clone().requires_grad_(),
        }
        new = shrink(save(old))
        for name, tensor in old.items():
            assert_same(new[name], tensor)

    def test_attributes_of_tensors_and_parameters_stay(self, save: Save) -> None:
        tensor, parameter = torch.randn(9_000)[5:9], torch.nn.Parameter(torch.randn(9_000)[50:54])
        tensor.note, parameter.note = "plain", "trained"
        new = shrink(save([tensor, parameter]))
        assert [item.note for item in new] == ["plain", "trained"]
        for item, old in zip(new, [tensor, parameter], strict=True):
            assert_same(item, old)


class TestSharing:
    def test_the_same_view_twice_is_one_tensor_still(self, save: Save) -> None:
        base = torch.randn(5_000)
        view = base[100:200]
        new = shrink(save({"embed": view, "head": view, "again": base[100:200], "other": base[3_000:3_010]}))
        assert new["embed"] is new["head"]
        new["embed"][0] = 7
        assert new["again"][0] == 7
        assert_same(new["other"], base[3_000:3_010])

    def test_overlapping_views_keep_one_storage_of_their_union(self, save: Save) -> None:
        base = torch.randn(5_000)
        new = shrink(save({"a": base[1_000:1_200], "c": base[1_100:1_300]}))
        assert_same(new["a"], base[1_000:1_200])
        assert_same(new["c"], base[1_100:1_300])
        assert new["a"].untyped_storage().nbytes() == 300 * 4
        assert new["c"].data_ptr() == new["a"].data_ptr() + 100 * 4

    def test_views_far_apart_get_storages_of_their_own(self, save: Save) -> None:
        base = torch.randn(50_000)
        names = [f"part{index}" for index in range(12)]
        old = {name: base[index * 4_000 : index * 4_000 + 50] for index, name in enumerate(names)}
        new = shrink(save(old))
        for name in names:
            assert_same(new[name], old[name])
            assert new[name].untyped_storage().nbytes() == 200

    def test_views_side_by_side_go_on_sharing(self, save: Save) -> None:
        flat = torch.randn(9_000)
        new = shrink(save({"q": flat[:100].view(10, 10), "k": flat[100:150], "v": flat[150:200]}))
        assert new["v"].data_ptr() == new["q"].data_ptr() + 150 * 4
        assert new["q"].untyped_storage().nbytes() == 800

    def test_user_keys_that_look_like_storage_keys_stay(self, save: Save) -> None:
        base = torch.randn(9_000)
        old = {"0": base[:3], "1": base[4_000:4_003], "2": "0", "3": base[8_000:8_003], 0: ["0", "1", "cpu", "storage"]}
        new = shrink(save(old))
        assert list(new) == list(old)
        assert (new["2"], new[0]) == ("0", ["0", "1", "cpu", "storage"])
        for key in "013":
            assert_same(new[key], old[key])

    def test_two_dtypes_on_bytes_without_a_type_stay_aligned(self, tmp_path: Path) -> None:
        bytes_ = torch.arange(8_000).to(torch.uint8).view(torch.uint16)
        old = [bytes_[1_001:1_004], bytes_.view(torch.uint32)[501:504], bytes_.view(torch.uint64)[250:253]]
        torch.save(old, tmp_path / "saved.pt")
        for new, expected in zip(shrink(tmp_path / "saved.pt"), old, strict=True):
            assert_same(new, expected)

    def test_a_storage_that_is_saved_itself_stays_whole(self, save: Save, tmp_path: Path) -> None:
        base = torch.randn(3_000)
        path = save({"view": base[:5], "storage": base.storage()})
        before = path.read_bytes()
        assert [file.outcome for file in shrink_tree(path).files] == ["unchanged"]
        assert path.read_bytes() == before

    def test_quantized_tensors_stay_whole(self, save: Save) -> None:
        buffer = torch.quantize_per_tensor(torch.randn(3_000), 0.1, 0, torch.qint8)
        path = save({"quantized": buffer[:10], "plain": torch.randn(2_000)[:4]})
        with torch.serialization.safe_globals([torch.per_tensor_affine]):
            new = shrink(path)
        assert new["quantized"].int_repr().equal(buffer[:10].int_repr())
        assert new["plain"].untyped_storage().nbytes() == 16

    def test_values_and_indices_of_sparse_tensors_are_cut(self, save: Save) -> None:
        values, indices = torch.randn(4_000)[:3], torch.arange(6_000)[:6].reshape(2, 3)
        old = torch.sparse_coo_tensor(indices, values, (10, 10), check_invariants=False)
        path = save(old)
        assert shrink(path).to_dense().equal(old.to_dense())


class TestEverythingElse:
    def test_containers_values_and_their_order_stay(self, save: Save) -> None:
        base = torch.randn(9_000)
        ordered = collections.OrderedDict(b=base[:5], a=base[4_000:4_005])
        ordered._metadata = {"": {"version": 2}}
        old = {
            "model": ordered,
            7: {"int_key": base[11]},
            "tuple": (base[300:310], "text", None, 1.5, float("nan"), -0.0, 2**70, True, b"\0\1", {1, 2}),
            "list": [base[20:30], [base[8_000:8_010], {"deep": base[-7:]}]],
        }
        new = shrink(save(old))
        assert type(new["model"]) is collections.OrderedDict
        assert new["model"]._metadata == ordered._metadata
        assert list(new["model"]) == ["b", "a"]
        assert list(new) == list(old)
        assert repr(new["tuple"][1:]) == repr(old["tuple"][1:])
        assert_same(new["list"][1][1]["deep"], base[-7:])
        assert_same(new[7]["int_key"], base[11])
        assert_same(new["tuple"][0], base[300:310])

    def test_an_optimizer_goes_on_as_if_nothing_had_happened(self, save: Save) -> None:
        torch.manual_seed(0)
        flat = torch.randn(10_000)
        model = torch.nn.Linear(20, 10)
        model.weight.data, model.bias.data = flat[500:700].view(10, 20), flat[9_000:9_010]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def train(steps: int) -> None:
            for step in range(steps):
                optimizer.zero_grad()
                model(torch.full((1, 20), float(step))).square().sum().backward()
                optimizer.step()

        train(2)
        path = save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2})
        loaded = shrink(path)
        train(3)
        expected = [parameter.detach().clone() for parameter in model.parameters()]
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        train(3)
        for parameter, value in zip(model.parameters(), expected, strict=True):
            assert parameter.equal(value)

    def test_tensors_inside_objects_of_unknown_classes_are_found(self, save: Save) -> None:
        base = torch.randn(9_000)
        path = save({"args": argparse.Namespace(bias=base[50:60], lr=1e-4), "step": 3})
        before = open_torch_file(path).value["args"]
        assert [file.outcome for file in shrink_tree(path).files] == ["shrunk"]
        with torch.serialization.safe_globals([argparse.Namespace]):
            new = torch.load(path, weights_only=True)
        assert_same(new["args"].bias, base[50:60])
        assert new["args"].lr == 1e-4
        after = open_torch_file(path).value["args"]
        assert isinstance(after, Stub)
        assert list(stub_state(after)) == list(stub_state(before)) == ["bias", "lr"]

    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_each_pickle_protocol_stays_sound(self, tmp_path: Path, protocol: int) -> None:
        path, base = tmp_path / "saved.pt", torch.randn(200_000)
        old = {f"layer.{index}": base[index * 200 : index * 200 + 70] for index in range(900)}
        torch.save(old, path, pickle_protocol=protocol)
        assert [file.outcome for file in shrink_tree(path).files] == ["shrunk"]
        opened = open_torch_file(path).value
        assert list(opened) == list(old)
        for name, expected in old.items():
            tensor = opened[name]
            assert isinstance(tensor, LazyTensor)
            with open(path, "rb") as file:
                file.seek(tensor.byte_offset)
                assert file.read(tensor.nbytes) == expected.numpy().tobytes()

    def test_records_that_are_no_storages_stay_as_they_were(self, tmp_path: Path) -> None:
        path, base = tmp_path / "saved.pt", torch.randn(9_000)
        torch.save({"w": base[:9], "v": base[5_000:5_009]}, path)
        with zipfile.ZipFile(path) as archive:
            before = {name: archive.read(name) for name in archive.namelist() if "/data" not in name}
        shrink(path)
        with zipfile.ZipFile(path) as archive:
            after = {name: archive.read(name) for name in archive.namelist() if "/data" not in name}
        assert list(after.items()) == list(before.items())
        assert set(after) > {"saved/byteorder", "saved/version", "saved/.data/serialization_id"}

    def test_the_shrunk_file_is_what_torch_itself_would_write(self, tmp_path: Path) -> None:
        path, clean = tmp_path / "bloated" / "saved.pt", tmp_path / "clean" / "saved.pt"
        base = torch.randn(9_000)
        for target, views in ((path, [base[100:200], base[70:70]]), (clean, [base[100:200].clone(), base[:0].clone()])):
            target.parent.mkdir()
            torch.save({"w": views[0], "n": [1, 2]}, target)
        shrink(path)
        found, expected = path.read_bytes(), clean.read_bytes()
        # The id hashes the names and checksums of what torch was asked to write, and nobody recomputes it.
        start = expected.index(b"serialization_id") + 16
        assert found[:start] == expected[:start]
        assert len(found) == len(expected)

    def test_torch_can_compute_where_the_storages_are(self, tmp_path: Path) -> None:
        path, base = tmp_path / "saved.pt", torch.randn(90_000)
        old = [base[:9], torch.randn(3), base[50_000:50_009], torch.empty(0), base[3:5], base[80_000:80_100]]
        torch.save(old, path)
        shrink(path)
        with torch.utils.serialization.config.patch("load.calculate_storage_offsets", True):
            found = [torch.load(path, weights_only=True, mmap=mmap) for mmap in (False, True)]
        for loaded in found:
            for new, expected in zip(loaded, old, strict=True):
                assert_same(new, expected)


class TestFrameworkFiles:
    def test_pipeline_layer_files_of_one_flat_buffer_fall_to_their_share(self, tmp_path: Path) -> None:
        flat = torch.randn(80_000).bfloat16()
        views = {f"layer_{index:02}-model_00-model_states.pt": flat[index * 10_000 :][:10_000] for index in range(8)}
        for name, view in views.items():
            torch.save({"weight": view.view(100, 100)}, tmp_path / name)
        report = shrink_tree(tmp_path)
        assert [file.outcome for file in report.files] == ["shrunk"] * 8
        assert report.before_bytes > 7 * report.after_bytes
        for name, view in views.items():
            assert_same(torch.load(tmp_path / name, weights_only=True)["weight"], view.view(100, 100))

    def test_deepspeed_shards_keep_flat_groups_and_moments(self, save: Save) -> None:
        flat, moment = torch.randn(4_001), torch.randn(4_001)
        group = {"step": 3, "exp_avg": moment[:4_000], "exp_avg_sq": moment[:4_000].square()}
        old = {
            "optimizer_state_dict": {
                "single_partition_of_fp32_groups": [flat[:4_000]],
                "base_optimizer_state": {"state": {0: group}, "param_groups": [{"lr": 0.1, "params": [0]}]},
                "zero_stage": 2,
                "partition_count": [2],
            },
            "ds_version": "0.16.4",
        }
        new = shrink(save(old))
        found = new["optimizer_state_dict"]
        assert_same(found["single_partition_of_fp32_groups"][0], flat[:4_000])
        assert_same(found["base_optimizer_state"]["state"][0]["exp_avg"], moment[:4_000])
        assert found["partition_count"] == [2]

    def test_megatron_ranks_keep_arguments_and_random_states(self, save: Save) -> None:
        shared = torch.randn(64, 512)
        old = {
            "args": argparse.Namespace(tensor_model_parallel_size=2, params_dtype=torch.bfloat16),
            "iteration": 10,
            "model": {"language_model": {"embedding": shared[:32], "output_layer": {"weight": shared[:32]}}},
            "rng_state": [{"torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {}}],
        }
        path = save(old)
        with torch.serialization.safe_globals([argparse.Namespace]):
            new = shrink(path)
        model = new["model"]["language_model"]
        assert_same(model["embedding"], shared[:32])
        assert model["embedding"].data_ptr() == model["output_layer"]["weight"].data_ptr()
        assert new["args"] == old["args"]
        assert new["rng_state"][0]["torch_rng_state"].equal(old["rng_state"][0]["torch_rng_state"])
