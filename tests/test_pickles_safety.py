"""Hostile and damaged torch files: nothing runs, nothing grows without bound, only our own errors come out."""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import io
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptflow.errors import CheckpointError, CorruptFileError, UnsafeFileError
from ckptflow.torchfiles import LazyStorage, LazyTensor, open_torch_file, read_pickle, stub_name, stub_state
from ckptflow.torchfiles.opcodes import MAX_CONTAINERS, MAX_OPCODE_BYTES, scan_pickle
from ckptflow.torchfiles.torch_builders import RebuildTensor

torch = pytest.importorskip("torch")


class Call:
    """Pickles as a call of anything."""

    def __init__(self, function: object, *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


def global_opcode(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text_opcode(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


class TestPayloads:
    @pytest.mark.parametrize("zip_format", [True, False])
    def test_a_command_is_refused_by_name_and_not_run(self, tmp_path: Path, zip_format: bool) -> None:
        marker = tmp_path / "ran"
        value = {"w": torch.ones(2), "x": Call(os.system, f"touch {marker}")}
        torch.save(value, tmp_path / "bad.pt", _use_new_zipfile_serialization=zip_format)
        with pytest.raises(UnsafeFileError, match=r"posix\.system|nt\.system"):
            open_torch_file(tmp_path / "bad.pt")
        assert not marker.exists()

    @pytest.mark.parametrize(
        "payload",
        [
            Call(builtins.eval, "1"),
            Call(builtins.exec, "x = 1"),
            Call(builtins.open, "/etc/passwd"),
            Call(builtins.__import__, "os"),
            Call(subprocess.check_output, ["true"]),
            Call(functools.partial, os.system, "true"),
            Call(functools.reduce, max, [1]),
            Call(builtins.map, print, [1]),
        ],
        ids=lambda call: call.call[0].__name__,
    )
    def test_functions_of_python_are_refused(self, payload: Call) -> None:
        with pytest.raises(UnsafeFileError, match="a reference to"):
            read_pickle(pickle.dumps(payload, 2), "bad.pkl")

    @pytest.mark.parametrize(
        ("module", "name"),
        [
            ("os", "system"),
            ("nt", "system"),
            ("commands", "getoutput"),
            ("importlib", "import_module"),
            ("runpy", "run_path"),
            ("sys", "exit"),
            ("pty", "spawn"),
            ("ctypes", "CDLL"),
            ("socket", "socket"),
            ("shutil", "rmtree"),
            ("pickle", "loads"),
            ("types", "CodeType"),
            ("marshal", "loads"),
            ("builtins", "compile"),
            ("builtins", "getattr.__class__"),
            ("operator", "methodcaller"),
            ("collections", "sys.exit"),
            ("os.path", "join"),
        ],
    )
    def test_a_mere_reference_to_code_is_refused_where_it_could_be_called(self, module: str, name: str) -> None:
        data = b"\x80\x04" + text_opcode(module) + text_opcode(name) + b"\x93)R."
        if (module, name) == ("collections", "sys.exit"):
            # Names with dots are never walked: this is a stub like any other.
            assert stub_name(read_pickle(data, "bad.pkl")) == "collections.sys.exit"
            return
        with pytest.raises(UnsafeFileError, match=f"{module}.{name}"):
            read_pickle(data, "bad.pkl")

    def test_functions_of_other_packages_are_recorded_and_not_run(self, tmp_path: Path) -> None:
        data = global_opcode("torch", "save") + text_opcode("x") + text_opcode(str(tmp_path / "ran")) + b"\x86R."
        found = read_pickle(data, "bad.pkl")
        assert stub_name(found) == "torch.save"
        assert not (tmp_path / "ran").exists()

    def test_the_fixture_with_a_command_is_refused(self, fixtures_dir: Path) -> None:
        with pytest.raises(UnsafeFileError, match=r"posix\.system"):
            open_torch_file(fixtures_dir / "bad-pickle-os-system" / "input" / "pytorch_model.bin")

    def test_attributes_are_looked_up_on_stubs_only(self) -> None:
        lookup = global_opcode("builtins", "getattr")
        member = read_pickle(lookup + global_opcode("a.b", "Color") + text_opcode("RED") + b"\x86R.", "p")
        assert stub_name(member) == "a.b.Color.RED"
        with pytest.raises(UnsafeFileError, match="attribute"):
            read_pickle(lookup + text_opcode("x") + text_opcode("format") + b"\x86R.", "p")


class TestNothingOfOursCanBeChanged:
    @pytest.mark.parametrize(
        "target",
        [
            ("torch._utils", "_rebuild_tensor_v2"),
            ("torch._utils", "_rebuild_tensor_v3"),
            ("torch._utils", "_rebuild_parameter"),
            ("torch", "Size"),
            ("torch", "float32"),
            ("torch", "FloatStorage"),
            ("collections", "OrderedDict"),
            ("builtins", "set"),
            ("some.where", "Class"),
        ],
    )
    @pytest.mark.parametrize("state", [{"_call": 1}, (None, {"_call": 1, "__defaults__": (1,)})])
    def test_the_state_of_a_global_can_t_be_set(self, target: tuple[str, str], state: object) -> None:
        data = b"\x80\x02" + global_opcode(*target) + pickle.dumps(state, 2)[2:-1] + b"b."
        with pytest.raises(CorruptFileError):
            read_pickle(data, "p")
        assert RebuildTensor.__call__.__defaults__ == (False, None, None)

    def test_an_ordered_dict_keeps_only_torch_s_metadata(self) -> None:
        value = collections.OrderedDict(a=1)
        value.items_ = value._metadata = "kept"  # type: ignore[attr-defined]
        found = read_pickle(pickle.dumps(value, 2), "p")
        assert isinstance(found, collections.OrderedDict)
        assert vars(found) == {"_metadata": "kept"}


class TestBounds:
    @pytest.mark.parametrize(
        "data",
        [
            b"\x80\x02Nr\xff\xff\xff\x7f.",
            b"\x80\x02Nr\x00\x00\x00\x40.",
            b"Np4294967295\n.",
            b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
            b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
            b"\x80\x04\x8d\x00\x00\x00\x00\x00\x01\x00\x00abc.",
            b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
            b"\x80\x02\x8b\xff\xff\xff\xff\x01.",
            b"\x80\x05\x96\x00\x00\x00\x00\x00\x00\x00\x40x.",
            b"\x80\x06N.",
            b"\x80\x02\x82\x01.",
            b"\x80\x02\x84\x01\x00\x00\x00.",
            b"\x80\x05\x97.",
            b"Pabc\n.",
            b"\x80\x02K\x01Q.",
            b"",
            b".",
            b"\xff\xfe",
            b"I1",
        ],
    )
    def test_absurd_requests_are_refused(self, data: bytes) -> None:
        with pytest.raises((CorruptFileError, UnsafeFileError)):
            read_pickle(data, "p")

    @pytest.mark.parametrize(
        "data",
        [
            b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
            b"\x80\x02)" + b"\x85" * 200_000 + b".",
            b"\x80\x02" + b"(" * 200_000 + b"t" * 200_000 + b".",
            b"\x80\x02}" + b"K\x00}" * 100_000 + b"s" * 100_000 + b".",
            b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.",
            b"\x80\x04\x8f()" + b"\x85" * 200_000 + b"\x90.",
            b"\x80\x02" + global_opcode("a", "B") * 50_000 + b")" + b"\x85R" * 50_000 + b".",
        ],
        ids=["lists", "tuples", "marks", "dicts", "hashed key", "set member", "calls"],
    )
    def test_deep_nesting_is_refused(self, data: bytes) -> None:
        with pytest.raises(CorruptFileError):
            read_pickle(data, "p")

    def test_copies_of_one_list_are_bounded(self) -> None:
        data = b"\x80\x02(" + b"K\x01" * 100_000 + b"lq\x00" + global_opcode("builtins", "set") + b"q\x01"
        data += b"h\x01h\x00\x85R" * 100_000 + b"."
        with pytest.raises(UnsafeFileError, match="over and over"):
            read_pickle(data, "p")

    def test_arguments_of_stubs_are_bounded(self) -> None:
        data = b"\x80\x02(" + b"K\x01" * 100_000 + b"tq\x00" + global_opcode("a", "B") + b"q\x01"
        data += b"h\x01h\x00\x81" * 100_000 + b"."
        with pytest.raises(UnsafeFileError, match="over and over"):
            read_pickle(data, "p")

    def test_containers_that_would_fill_the_memory_are_refused(self) -> None:
        with pytest.raises(UnsafeFileError, match="absurd number of objects"):
            read_pickle(b"\x80\x04N" + b"\x8f" * (MAX_CONTAINERS + 1) + b".", "p")

    def test_opcodes_that_would_fill_the_memory_are_refused(self) -> None:
        number = b"G" + bytes(8)
        with pytest.raises(UnsafeFileError, match="absurd number of objects"):
            read_pickle(b"\x80\x04N" + number * (MAX_OPCODE_BYTES // 9) + number + b".", "p")

    def test_the_metadata_of_a_large_job_is_no_bomb(self) -> None:
        """405B parameters with two moments on 512 ranks are 1.7 million shards, of 139 bytes and 6 containers each."""
        shard = b"}\x85" * 3 + b"J\x00\x00\x00\x00" * 23 + text_opcode("__127_0.distc")
        assert scan_pickle(b"\x80\x02" + shard * 1_700_000 + b".", "p") == 3 + 139 * 1_700_000

    def test_many_classes_are_refused(self) -> None:
        data = b"".join(global_opcode("a", f"C{i}") for i in range(20_000)) + b"."
        with pytest.raises(UnsafeFileError, match="number of classes"):
            read_pickle(data, "p")

    def test_bytes_of_a_given_length_are_not_made(self) -> None:
        with pytest.raises(CorruptFileError):
            read_pickle(global_opcode("builtins", "bytes") + b"J\xff\xff\xff\x7f\x85R.", "p")

    def test_hostile_pickles_take_little_memory(self) -> None:
        code = (
            "import sys\n"
            "from ckptflow.errors import CkptflowError\n"
            "from ckptflow.torchfiles import read_pickle\n"
            "for data in (b'Nr\\xff\\xff\\xff\\x7f.', b'\\x8e' + b'\\xff' * 7 + b'\\x0f.', b'Np999999999\\n.'):\n"
            "    try:\n        read_pickle(data, 'p')\n    except CkptflowError:\n        continue\n    sys.exit(3)\n"
            "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert int(done.stdout) < 120_000  # KB

    def test_a_tensor_outside_its_storage_is_refused(self, tmp_path: Path) -> None:
        torch.save({"w": torch.arange(8.0)[:4]}, tmp_path / "saved.pt")
        with zipfile.ZipFile(tmp_path / "saved.pt") as source, zipfile.ZipFile(tmp_path / "bad.pt", "w") as target:
            for name in source.namelist():
                data = source.read(name)
                # Shape (4,) becomes (9,): BININT1, TUPLE1.
                target.writestr(name, data.replace(b"K\x04\x85", b"K\x09\x85") if name.endswith(".pkl") else data)
        with pytest.raises(CorruptFileError, match="beyond the end of its storage"):
            open_torch_file(tmp_path / "bad.pt")


def saved_bytes(zip_format: bool) -> bytes:
    base = torch.arange(12.0).reshape(3, 4)
    value = collections.OrderedDict(
        a=base,
        view=base[1:, ::2],
        p=torch.nn.Parameter(torch.ones(2)),
        half=torch.ones(3, dtype=torch.bfloat16),
        other={"step": 3, "list": [1, "x", None], "set": {1}, "bytes": b"\x00\x01", "stub": Namespace(a=1)},
    )
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zip_format)
    return buffer.getvalue()


class Namespace:
    def __init__(self, a: int) -> None:
        self.a = a


SAVED = {kind: saved_bytes(kind) for kind in (True, False)}


@pytest.mark.parametrize("zip_format", [True, False])
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_gives_our_errors_or_tensors_within_the_file(
    tmp_path: Path, zip_format: bool, data: st.DataObject
) -> None:
    content = bytearray(SAVED[zip_format])
    edits = st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), min_size=1, max_size=6)
    for place, byte in data.draw(edits):
        content[place] = byte
    path = tmp_path / "mutated.pt"
    path.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)) | st.just(len(content)))])
    storages: tuple[LazyStorage, ...] = ()
    with contextlib.suppress(CheckpointError):
        storages = open_torch_file(path).storages
    for storage in storages:
        assert 0 <= storage.offset <= storage.offset + storage.nbytes <= len(content)


PICKLE = pickle.dumps({"a": [1, (2, "x")], "n": Namespace(1), "d": collections.OrderedDict(b=b"raw")}, 4)


@settings(max_examples=200, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, len(PICKLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_pickle_gives_our_errors_only(edits: list[tuple[int, int]]) -> None:
    content = bytearray(PICKLE)
    for place, byte in edits:
        content[place] = byte
    found: object = None
    with contextlib.suppress(CheckpointError):
        found = read_pickle(bytes(content), "p")
    assert not isinstance(found, LazyTensor)
    stub_state(found)


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=60))
def test_random_bytes_give_our_errors_only(content: bytes) -> None:
    found: object = None
    with contextlib.suppress(CheckpointError):
        found = read_pickle(content, "p")
    assert not isinstance(found, LazyTensor)
