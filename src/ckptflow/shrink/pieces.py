"""Decides which bytes of each storage stay, and what the pickle must say then. Pure functions; no file is touched."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from ckptflow.shrink.uses import Literal, StorageUse, Survey, TensorUse
from ckptflow.torchfiles.lazy import LazyStorage

# What one more storage costs in a file: its header, padding to 64 bytes, directory entry and persistent id.
STORAGE_COST_BYTES: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a storage that becomes a storage of its own.

    Attributes:
        key: name of the storage now.
        new_key: name of the part; one part of each storage keeps the name.
        start: first byte in the storage.
        stop: the byte behind the last.
    """

    key: str
    new_key: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Edit:
    """Bytes ``start`` to ``end`` of the pickle are replaced by ``text``."""

    start: int
    end: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """What becomes of all storages: pieces in the order in which the pickle first mentions them, and its edits."""

    pieces: tuple[Piece, ...]
    edits: tuple[Edit, ...]


def plan_cut(survey: Survey, storages: Iterable[LazyStorage]) -> Cut:
    """Reduces each storage to what its tensors use.

    Windows that overlap, or lie closer together than a new storage would cost, stay in one storage: what shared
    bytes still shares them. Tensors without elements go with any part.
    """
    sizes = {storage.key: storage.nbytes for storage in storages}
    uses: dict[str, list[StorageUse]] = {key: [] for key in sizes}
    for use in survey.uses:
        uses[str(use.key.value)].append(use)
    names = _new_names(sizes)
    placed: dict[int, Piece] = {}
    for key, mentions in uses.items():
        placed.update(_place(key, sizes[key], mentions, names))
    pieces = dict.fromkeys(placed[id(use)] for use in survey.uses)
    edits = [edit for use in survey.uses for edit in _edits(use, placed[id(use)])]
    return Cut(tuple(pieces), tuple(edits))


def apply_edits(data: bytes, survey: Survey, edits: Iterable[Edit]) -> bytes:
    """The pickle with its edits made, and the lengths of its frames in step."""
    wanted, lengths = tuple(edits), []
    for start, length in survey.frames:
        inside = [edit for edit in wanted if start <= edit.start < start + length]
        grown = sum(len(edit.text) - (edit.end - edit.start) for edit in inside)
        if grown:
            lengths.append(Edit(start - 8, start, (length + grown).to_bytes(8, "little")))
    ordered = sorted([*wanted, *lengths], key=lambda edit: edit.start)
    parts, at = [], 0
    for edit in ordered:
        parts += [data[at : edit.start], edit.text]
        at = edit.end
    return b"".join([*parts, data[at:]])


def _place(key: str, nbytes: int, uses: list[StorageUse], names: Iterator[str]) -> Iterator[tuple[int, Piece]]:
    """The piece for each mention of a storage, by the mention's id."""
    whole = Piece(key=key, new_key=key, start=0, stop=nbytes)
    tensors = [use.tensor for use in uses if use.tensor is not None and not use.whole]
    if len(tensors) < len(uses):
        yield from ((id(use), whole) for use in uses)
        return
    spans = _spans(tensors, max((use.itemsize for use in uses), default=1), nbytes)
    homes = [_home(tensor, spans) for tensor in tensors]
    # The first mention keeps the name: what it defines in the memo of the pickle then stays true.
    kept = {homes[0]: key} if homes else {}
    pieces = {
        home: Piece(key=key, new_key=kept.get(home) or next(names), start=spans[home][0], stop=spans[home][1])
        for home in dict.fromkeys(homes)
    }
    found = {id(use): pieces[home] for use, home in zip(uses, homes, strict=True)}
    possible = all(edit is not None for use in uses for edit in _wanted(use, found[id(use)]))
    yield from found.items() if possible else ((id(use), whole) for use in uses)


def _spans(tensors: list[TensorUse], itemsize: int, nbytes: int) -> list[tuple[int, int]]:
    """Parts of a storage that are used, in bytes, ascending; ends are at elements of the widest dtype."""
    step = max([itemsize, *(tensor.itemsize for tensor in tensors)])
    spans: list[tuple[int, int]] = []
    for start, stop in sorted(window for tensor in tensors if (window := tensor.window())[0] < window[1]):
        start, stop = start // step * step, min(-(-stop // step) * step, nbytes)
        if spans and start <= spans[-1][1] + STORAGE_COST_BYTES:
            spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
        else:
            spans.append((start, stop))
    return spans or [(0, 0)]


def _home(tensor: TensorUse, spans: list[tuple[int, int]]) -> int:
    start, stop = tensor.window()
    inside = (index for index, span in enumerate(spans) if span[0] <= start and stop <= span[1])
    return next(inside, 0)


def _edits(use: StorageUse, piece: Piece) -> Iterator[Edit]:
    for edit in _wanted(use, piece):
        if edit is not None:
            yield edit


def _wanted(use: StorageUse, piece: Piece) -> Iterator[Edit | None]:
    """Edits for one mention; None stands for one that can't be made."""
    if piece.new_key != piece.key:
        text = piece.new_key.encode()
        yield _replaced(use.key, b"X" + len(text).to_bytes(4, "little") + text)
    numel = piece.nbytes // use.itemsize
    if use.whole or use.tensor is None:
        return
    if numel != use.numel.value:
        yield _replaced(use.numel, pickled_int(numel))
    offset = use.tensor.storage_offset
    moved = max(0, int(offset.value) - piece.start // use.tensor.itemsize)
    if use.tensor.window()[0] == use.tensor.window()[1]:
        # No element, so that any offset inside will do.
        moved = min(moved, piece.nbytes // use.tensor.itemsize)
    if moved != offset.value:
        yield _replaced(offset, pickled_int(moved))


def _replaced(literal: Literal, text: bytes) -> Edit | None:
    return Edit(literal.start, literal.end, text) if literal.editable else None


def pickled_int(value: int) -> bytes:
    """The opcode that pushes ``value`` (0 or more), as pickle protocol 2 writes it."""
    if value < 2**8:
        return b"K" + value.to_bytes(1, "little")
    if value < 2**16:
        return b"M" + value.to_bytes(2, "little")
    if value < 2**31:
        return b"J" + value.to_bytes(4, "little")
    length = value.bit_length() // 8 + 1
    return b"\x8a" + length.to_bytes(1, "little") + value.to_bytes(length, "little")


def _new_names(taken: Container[str]) -> Iterator[str]:
    """Names for parts, as torch counts storages, that no storage has."""
    return (name for name in map(str, itertools.count()) if name not in taken)
