"""Shrinking any tree of views on any storages: same values, same sharing, never larger; and damaged files stay."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest

from ckptflow.shrink import shrink_tree

torch = pytest.importorskip("torch")
hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
BASE_NUMEL = 1_500


@st.composite
def views(draw: object, bases: list[object]) -> object:
    """A view on one of the bases: any window, any strides, zeros and sizes of 0 and 1 among them."""
    base = draw(st.sampled_from(bases))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    strides = [draw(st.integers(0, 40)) for _ in shape]
    span = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    offset = draw(st.integers(0, max(0, BASE_NUMEL - 1 - span)))
    view = base.as_strided(shape, strides, offset)
    if view.is_complex() and draw(st.booleans()):
        view = view.conj()
    if view.dtype == torch.float32 and draw(st.booleans()):
        view = torch.nn.Parameter(view, requires_grad=draw(st.booleans()))
    return view


@st.composite
def trees(draw: object) -> object:
    """Nested containers of views and plain values; some tensors and containers occur several times."""
    bases = [
        (torch.arange(BASE_NUMEL) * 7 % 256).to(draw(st.sampled_from(DTYPES))) for _ in range(draw(st.integers(1, 3)))
    ]
    pool = draw(st.lists(views(bases), min_size=1, max_size=6))
    plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text("0123abc", max_size=3))
    leaves = st.one_of(st.sampled_from(pool), views(bases), plain)
    keys = st.one_of(st.integers(0, 3), st.text("0123", min_size=1, max_size=1))
    return draw(
        st.recursive(
            leaves,
            lambda inner: st.one_of(
                st.lists(inner, max_size=4),
                st.lists(inner, max_size=4).map(tuple),
                st.dictionaries(keys, inner, max_size=4),
            ),
            max_leaves=12,
        )
    )


def leaves_of(tree: object, place: str = "") -> list[tuple[str, object]]:
    """(place with the kinds of all containers and keys, leaf) for all leaves."""
    if isinstance(tree, dict):
        return [leaf for key, item in tree.items() for leaf in leaves_of(item, f"{place}/dict:{key!r}")]
    if isinstance(tree, list | tuple):
        kind = type(tree).__name__
        return [leaf for index, item in enumerate(tree) for leaf in leaves_of(item, f"{place}/{kind}:{index}")]
    return [(place, tree)]


def bits(tensor: object) -> bytes:
    """The values, in row-major order."""
    # A tensor of one element may keep a stride that torch doesn't let us see as bytes.
    packed = torch.empty(tensor.numel(), dtype=tensor.dtype)
    packed.copy_(tensor.detach().resolve_conj().reshape(-1))
    return bytes(packed.view(torch.uint8)) if tensor.numel() else b""


def bytes_used(tensor: object) -> set[int]:
    """Addresses of the tensor's bytes."""
    if not tensor.numel():
        return set()
    places = {0}
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = {place + index * stride for place in places for index in range(size)}
    width = tensor.element_size()
    return {tensor.data_ptr() + place * width + byte for place in places for byte in range(width)}


@hypothesis.given(tree=trees(), legacy=st.booleans(), protocol=st.sampled_from([2, 2, 4]))
@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
def test_any_tree_of_views_comes_back_the_same(tree: object, legacy: bool, protocol: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "saved.pt"
        # torch loads newer protocols only without weights_only; there the proof after the rewrite is the test.
        torch.save(tree, path, _use_new_zipfile_serialization=not legacy, pickle_protocol=protocol)
        before = path.stat().st_size
        old = torch.load(path, weights_only=True) if protocol == 2 else None
        (done,) = shrink_tree(path).files
        assert done.outcome in ("shrunk", "unchanged"), done
        assert path.stat().st_size == done.after_bytes <= before
        if protocol == 2:
            assert_same_tree(torch.load(path, weights_only=True), old)


def assert_same_tree(new: object, old: object) -> None:
    """Same structure, values, flags and sharing."""
    found, expected = leaves_of(new), leaves_of(old)
    assert [place for place, _ in found] == [place for place, _ in expected]
    pairs = []
    for (_, a), (_, b) in zip(found, expected, strict=True):
        assert type(a) is type(b)
        if not isinstance(b, torch.Tensor):
            assert repr(a) == repr(b)
            continue
        assert (a.dtype, a.shape, a.stride(), a.requires_grad) == (b.dtype, b.shape, b.stride(), b.requires_grad)
        assert a.is_conj() == b.is_conj()
        assert bits(a) == bits(b)
        pairs.append((a, b))
    for (a, b), (c, d) in itertools.combinations(pairs, 2):
        assert (a is c) == (b is d)
        if bytes_used(b) & bytes_used(d):
            assert a.data_ptr() - c.data_ptr() == b.data_ptr() - d.data_ptr()
            assert a.untyped_storage().data_ptr() == c.untyped_storage().data_ptr()


@hypothesis.given(data=st.data(), legacy=st.booleans())
@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
def test_a_damaged_file_fails_cleanly_or_keeps_what_torch_reads(data: object, legacy: bool) -> None:
    base = torch.arange(2_000.0)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "saved.pt"
        torch.save({"a": base[5:9], "b": [base[1_500:1_600]]}, path, _use_new_zipfile_serialization=not legacy)
        content = bytearray(path.read_bytes())
        for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=3)):
            content[place] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        old = loaded_by_torch(path)
        (done,) = shrink_tree(path).files
        assert [entry.name for entry in Path(directory).iterdir()] == ["saved.pt"]
        if done.outcome != "shrunk":
            assert path.read_bytes() == content
        elif old is not None:
            assert_same_tree(torch.load(path, weights_only=True), old)


def loaded_by_torch(path: Path) -> object:
    """What torch makes of a file that may be damaged; None where it refuses it."""
    try:
        return torch.load(path, weights_only=True)
    except Exception:  # noqa: BLE001 - whatever torch raises on garbage
        return None
