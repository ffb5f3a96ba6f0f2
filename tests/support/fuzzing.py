"""Converts damaged checkpoints and judges what comes out.

The rule: our own errors only, in bounded time; and where a conversion succeeds, every value is that of the undamaged
checkpoint, except in tensors whose own bytes were changed in place.
"""

from __future__ import annotations

import pickle
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ckptflow.conversion import plan_conversion
from ckptflow.convert import convert
from ckptflow.errors import CkptflowError
from ckptflow.formats.registry import check, locate
from ckptflow.plan import PlannedTensor
from ckptflow.request import ConvertRequest
from ckptflow.tensors import TensorSource
from fuzz_mutations import Mutation, Touched, apply
from fuzz_seeds import NAMELESS_FILES, OPINIONS, REWRITTEN, UNPROTECTED_HEADERS, UNPROTECTED_VALUES, Seed

SECONDS_PER_INPUT = 20
Value = tuple[str, tuple[int, ...], bytes]


@dataclass(frozen=True, slots=True)
class Outcome:
    """``refused``, ``same``, ``unlike`` (values differ where nothing can show it) or ``wrong``."""

    kind: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Undamaged:
    """A checkpoint, the values that it gives, and the bytes that each tensor is made of.

    Attributes:
        layout: its name among the seeds.
        root: its directory.
        seed: what to convert in it.
        values: FQN → dtype, shape, bytes.
        ranges: FQN → (file relative to root, begin, end), in bytes.
        second_opinion: reads a copy with the format's own library; None where there is none, or nothing it can add.
    """

    layout: str
    root: Path
    seed: Seed
    values: Mapping[str, Value]
    ranges: Mapping[str, Sequence[tuple[str, int, int]]]
    second_opinion: Callable[[Path], Mapping[str, Tensor]] | None = None


def request_of(root: Path, seed: Seed, out: Path) -> ConvertRequest:
    paths = {k: root / v if k in ("base_model", "config_dir") else v for k, v in seed.options.items()}
    return ConvertRequest(path=root / seed.path, out=out, **{"dtype": "source", "threads": 1, **paths})


def values_of(out: Path) -> dict[str, Value]:
    from safetensors.numpy import deserialize

    found: dict[str, Value] = {}
    for path in sorted(out.glob("*.safetensors")):
        for name, facts in deserialize(path.read_bytes()):
            found[name] = (facts["dtype"], tuple(facts["shape"]), bytes(facts["data"]))
    return found


def undamaged(layout: str, root: Path, seed: Seed, out: Path) -> Undamaged:
    request = request_of(root, seed, out)
    plan = plan_conversion(request).plan
    convert(request)
    ranges = {t.fqn: list(_ranges(t, root)) for t in plan.tensors}
    return Undamaged(layout, root, seed, values_of(out), ranges, OPINIONS.get(layout))


def _ranges(tensor: PlannedTensor, root: Path) -> Iterator[tuple[str, int, int]]:
    fold = tensor.fold
    sources = [tensor.source] if fold is None else [tensor.source, *_fold_sources(fold)]
    for source in sources:
        for piece in source.pieces:
            span = sum((n - 1) * s for n, s in zip(piece.sizes, piece.strides, strict=True)) + 1
            name = str(Path(piece.file.path).relative_to(root))
            yield name, piece.offset_bytes, piece.offset_bytes + span * source.dtype.itemsize


def _fold_sources(fold: Any) -> list[TensorSource]:
    fields = (getattr(fold, name) for name in type(fold).__dataclass_fields__)
    return [value for value in fields if isinstance(value, TensorSource)]


def attempt(good: Undamaged, mutations: Sequence[Mutation], work: Path, full: bool = True) -> Outcome:
    """Damage a copy, convert it, judge.

    Args:
        good: the checkpoint.
        mutations: applied in order.
        work: an empty directory, removed afterwards.
        full: convert; else only detect and plan.
    """
    root = work / "checkpoint"
    work.mkdir(exist_ok=True)
    shutil.copytree(good.root, root, symlinks=True)
    try:
        touched = [t for mutation in mutations if (t := apply(mutation, root)) is not None]
        if not touched:
            return Outcome("untouched")
        with time_limit(SECONDS_PER_INPUT):
            return _judge(good, root, work / "out", touched, full)
    finally:
        shutil.rmtree(work)


def _judge(good: Undamaged, root: Path, out: Path, touched: Sequence[Touched], full: bool) -> Outcome:
    request = request_of(root, good.seed, out)
    try:
        check(locate(request.path))
        if not full:
            plan_conversion(request)
            return Outcome("planned")
        convert(request)
    except CkptflowError as error:
        left = out.exists()
        return Outcome("wrong", "OUT exists after a refusal") if left else Outcome("refused", str(error))
    found = values_of(out)
    differing = sorted({n for n in good.values if found.get(n) != good.values[n]} | (found.keys() - good.values.keys()))
    if not differing:
        return Outcome("same")
    unexplained = [n for n in differing if not _explained(n, good, found, touched, root)]
    if not unexplained:
        return Outcome("unlike", "its own bytes were changed")
    opinion = _second_opinion(good, root)
    if opinion is not None:
        if _agrees(opinion, found):
            return Outcome("unlike", "another reader gets the same from the damaged files")
    elif _can_not_be_shown(good.layout, touched):
        return Outcome("unlike", "nothing in the files can show it")
    return Outcome("wrong", f"{', '.join(unexplained[:4])} differ")


def _second_opinion(good: Undamaged, root: Path) -> Mapping[str, Tensor] | None:
    try:
        return None if good.second_opinion is None else good.second_opinion(root)
    except (pickle.UnpicklingError, RuntimeError):  # torch knows fewer classes than the reader has stubs for
        return None


def _can_not_be_shown(layout: str, touched: Sequence[Touched]) -> bool:
    kinds = {t.kind for t in touched}
    return bool(
        kinds & REWRITTEN
        or (layout in UNPROTECTED_HEADERS and any(t.in_place for t in touched))
        or (layout in NAMELESS_FILES and kinds & {"swap", "duplicate", "rename"})
    )


def _agrees(opinion: Mapping[str, Tensor], found: Mapping[str, Value]) -> bool:
    return all(name in opinion and _bits(opinion[name]) == value[2] for name, value in found.items())


def _bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _explained(name: str, good: Undamaged, found: Mapping[str, Value], touched: Sequence[Touched], root: Path) -> bool:
    """Whether the tensor's own bytes were changed in place where no checksum shows it, and nothing else about it."""
    if good.layout not in UNPROTECTED_VALUES:
        return False
    if name not in good.values or name not in found or good.values[name][:2] != found[name][:2]:
        return False
    return any(
        t.in_place and str(root / file) == t.name and t.begin < end and begin < t.end
        for file, begin, end in good.ranges[name]
        for t in touched
    )


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the main thread when the time is over."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
