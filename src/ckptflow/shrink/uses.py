"""What a pickle says about storages and the tensors on them, with the places in the pickle that say it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Literal:
    """A number or text that the bytes ``start`` to ``end`` of the pickle push.

    Attributes:
        editable: False where a second place uses it through the memo, so that its bytes must stay.
    """

    value: int | str
    start: int
    end: int
    editable: bool = True


@dataclass(slots=True, eq=False)
class StorageUse:
    """One mention of a storage: a persistent id.

    Attributes:
        key: name of the storage.
        numel: its length, in elements of ``itemsize`` bytes.
        tensor: what was made of it by a known function.
        whole: whether the storage must stay as it is, whatever its tensors use.
    """

    key: Literal
    numel: Literal
    itemsize: int
    tensor: TensorUse | None = None
    whole: bool = False


@dataclass(slots=True, eq=False)
class TensorUse:
    """One call that makes a tensor of a storage: a window of elements of ``itemsize`` bytes."""

    storage_offset: Literal
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def window(self) -> tuple[int, int]:
        """First byte in the storage and the byte behind the last; both the first for a tensor without elements."""
        first = int(self.storage_offset.value)
        if 0 in self.shape:
            return first * self.itemsize, first * self.itemsize
        span = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return first * self.itemsize, (first + span + 1) * self.itemsize


@dataclass(frozen=True, slots=True)
class Survey:
    """What a pickle says about storages.

    Attributes:
        uses: all mentions, in the order of the pickle.
        frames: start of the content and length in bytes of each frame (pickle protocol 4).
        unknown: persistent ids that aren't plain storages.
    """

    uses: tuple[StorageUse, ...]
    frames: tuple[tuple[int, int], ...]
    unknown: int
