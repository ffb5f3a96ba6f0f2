"""What a second reader gives, and how it is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Protocol

from ckptflow.errors import InconsistentCheckpointError
from ckptflow.tensors import Shape

if TYPE_CHECKING:
    import torch

WRAPPER_PARTS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


class UncoveredError(RuntimeError):
    """A second reader does not cover this checkpoint. The message names what it does not cover."""


class Rereader(Protocol):
    """Tensors of a checkpoint, read box by box.

    Attributes:
        how: how the source is read, for people.
    """

    how: str

    def shape(self, fqn: str) -> Shape | None:
        """Global shape; None where this reader has no such tensor."""
        ...

    def read(self, fqn: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        """The box ``[offsets, offsets + sizes)`` of a global tensor, in the dtype of the checkpoint.

        Raises:
            InconsistentCheckpointError: the shards leave a gap in the box, or contradict themselves.
        """
        ...


def boxes(shape: Shape, most_elements: int) -> Iterator[tuple[Shape, Shape]]:
    """Offsets and sizes of boxes that tile a shape in row-major order, each of at most ``most_elements`` elements."""
    if prod(shape) <= most_elements or not shape:
        if prod(shape):
            yield (0,) * len(shape), shape
        return
    row = prod(shape[1:])
    if row <= most_elements:
        step = most_elements // row
        for start in range(0, shape[0], step):
            yield (start, *(0,) * (len(shape) - 1)), (min(step, shape[0] - start), *shape[1:])
        return
    for index in range(shape[0]):
        for offsets, sizes in boxes(shape[1:], most_elements):
            yield (index, *offsets), (1, *sizes)


def window_of(offsets: Shape, sizes: Shape) -> tuple[slice, ...]:
    """Index of a box."""
    return tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))


def put_together(
    fqn: str, offsets: Shape, sizes: Shape, parts: Iterable[tuple[Shape, Shape, Callable[[Shape, Shape], torch.Tensor]]]
) -> torch.Tensor:
    """The box ``[offsets, offsets + sizes)`` of a tensor from parts that are boxes of it themselves.

    Args:
        fqn: the tensor, for messages.
        offsets: of the box, in elements.
        sizes: of the box.
        parts: of each its offsets and sizes, and what reads a box of it, whose offsets count from the part's own.

    Raises:
        InconsistentCheckpointError: the parts leave a gap.
    """
    import torch

    box: torch.Tensor | None = None
    filled: torch.Tensor | None = None
    for at, extent, read in parts:
        low = [max(a, b) for a, b in zip(at, offsets, strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(at, extent, offsets, sizes, strict=True)]
        if any(lo >= h for lo, h in zip(low, high, strict=True)):
            continue
        inner = tuple(lo - a for lo, a in zip(low, at, strict=True))
        values = read(inner, tuple(h - lo for lo, h in zip(low, high, strict=True)))
        if tuple(values.shape) == sizes:
            return values
        if box is None or filled is None:
            box, filled = torch.empty(sizes, dtype=values.dtype), torch.zeros(sizes, dtype=torch.bool)
        where = window_of(tuple(lo - b for lo, b in zip(low, offsets, strict=True)), tuple(values.shape))
        box[where], filled[where] = values, True
    if box is None or filled is None or not bool(filled.all()):
        raise InconsistentCheckpointError(
            "the parts of a tensor leave a gap",
            tensor=fqn,
            expected=f"{prod(sizes)} elements at {list(offsets)}",
            found=f"{0 if filled is None else int(filled.sum())} elements",
        )
    return box


def by_plain_name(names: Sequence[str]) -> Callable[[str], str | None]:
    """Look-up of a name that may have lost its wrappers on the way; None where nothing or more than one thing fits."""
    exact = set(names)
    plain: dict[str, str | None] = {}
    for name in names:
        bare = name
        for part in WRAPPER_PARTS:
            bare = bare.replace(part, "")
        for key in {bare, bare.removeprefix("module."), bare.removeprefix("pretrained_model.")}:
            plain[key] = None if key in plain else name

    def look_up(fqn: str) -> str | None:
        return fqn if fqn in exact else plain.get(fqn)

    return look_up


def by_ending(names: Iterable[str], homes: Sequence[str]) -> Callable[[str], str | None]:
    """Look-up of a model's tensor among names of a whole training state.

    Args:
        names: all of them, with dots.
        homes: where trainers put the model, such as ``""`` and ``"model."``; the first one that has the tensor counts.
            Without any of them, a name that ends so must be the only one.
    """
    endings: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        for first in range(len(parts)):
            endings.setdefault(".".join(parts[first:]), []).append(name)

    def look_up(fqn: str) -> str | None:
        found = endings.get(fqn, [])
        at_home = next((name for name in (home + fqn for home in homes) if name in found), None)
        return found[0] if at_home is None and len(found) == 1 else at_home

    return look_up
