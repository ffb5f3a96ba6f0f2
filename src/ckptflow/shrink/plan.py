"""Plans what shrinking one torch file would do; nothing is written."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from ckptflow.shrink.pieces import Piece, apply_edits, plan_cut
from ckptflow.shrink.rewriting import NewFile, new_legacy_file, new_zip
from ckptflow.shrink.survey import survey_pickle
from ckptflow.shrink.uses import Survey
from ckptflow.torchfiles.lazy import LazyStorage
from ckptflow.torchfiles.reader import TorchFile, open_torch_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """How to make the shrunk file.

    Attributes:
        file: the file as it is.
        stat: its state before it was read.
        pieces: what becomes of its storages.
        new: the shrunk file.
        cut: storages of which bytes are dropped.
    """

    file: TorchFile
    stat: os.stat_result
    pieces: tuple[Piece, ...]
    new: NewFile
    cut: tuple[LazyStorage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkPlan:
    """What shrinking one file would do.

    Attributes:
        path: the file.
        before_bytes: its size.
        after_bytes: its size once shrunk; the same where there is nothing to gain.
        storage_bytes: bytes of its storages.
        kept_bytes: bytes of them that would stay.
        reason: why nothing would be done; None where something would.
        rewrite: how to do it; None where nothing would be done.
    """

    path: Path
    before_bytes: int
    after_bytes: int
    storage_bytes: int
    kept_bytes: int
    reason: str | None = None
    rewrite: Rewrite | None = field(default=None, repr=False)

    @property
    def saved_bytes(self) -> int:
        """Bytes that shrinking frees."""
        return self.before_bytes - self.after_bytes


def plan_shrink(path: str | os.PathLike[str]) -> ShrinkPlan:
    """Plans to reduce each storage of a torch file to the bytes that its tensors use; reads no tensor data.

    Tensors that share bytes go on sharing them; shapes, strides, flags and everything that isn't a tensor stay.

    Raises:
        CheckpointError: the file isn't a sound torch file; see ``open_torch_file``.
    """
    path = Path(path)
    stat = path.stat()
    file = open_torch_file(path)
    data = _read(file)
    survey = survey_pickle(data, file.path)
    stored = sum(storage.nbytes for storage in file.storages)
    reason = _untouchable(file, survey)
    if reason is not None:
        return _nothing(path, stat, stored, reason)
    cut = plan_cut(survey, file.storages)
    kept = sum(piece.nbytes for piece in cut.pieces)
    if kept >= stored:
        return _nothing(path, stat, stored, "each storage is used to its end")
    new = _new_file(file, survey, cut.pieces, apply_edits(data, survey, cut.edits))
    if new.nbytes >= stat.st_size:
        return _nothing(path, stat, stored, "the file would not become smaller")
    whole = {piece.key for piece in cut.pieces if piece.new_key == piece.key and piece.start == 0}
    sizes = {piece.key: piece.nbytes for piece in cut.pieces if piece.key in whole}
    rewrite = Rewrite(
        file=file,
        stat=stat,
        pieces=cut.pieces,
        new=new,
        cut=tuple(storage for storage in file.storages if sizes.get(storage.key) != storage.nbytes),
    )
    return ShrinkPlan(
        path=path,
        before_bytes=stat.st_size,
        after_bytes=new.nbytes,
        storage_bytes=stored,
        kept_bytes=kept,
        rewrite=rewrite,
    )


def _nothing(path: Path, stat: os.stat_result, stored: int, reason: str) -> ShrinkPlan:
    return ShrinkPlan(
        path=path,
        before_bytes=stat.st_size,
        after_bytes=stat.st_size,
        storage_bytes=stored,
        kept_bytes=stored,
        reason=reason,
    )


def _read(file: TorchFile) -> bytes:
    with open(file.path, "rb") as source:
        source.seek(file.pickle_offset)
        return source.read(file.pickle_nbytes)


def _untouchable(file: TorchFile, survey: Survey) -> str | None:
    """Why the file must stay as it is, whatever its tensors use."""
    if not file.storages:
        return "it holds no storages"
    mentioned = {use.key.value for use in survey.uses}
    if survey.unknown or mentioned != {storage.key for storage in file.storages}:
        return "it refers to storages in an unknown way"
    if file.format == "legacy" and max(storage.offset + storage.nbytes for storage in file.storages) != file.length:
        return "other data follow the saved object"
    return None


def _new_file(file: TorchFile, survey: Survey, pieces: tuple[Piece, ...], pickled: bytes) -> NewFile:
    archive = file.read_archive()
    if archive is not None:
        return new_zip(file, archive, pieces, pickled)
    return new_legacy_file(file, pieces, pickled, {str(use.key.value): use.itemsize for use in survey.uses})
