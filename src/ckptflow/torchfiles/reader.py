"""Opens what ``torch.save`` wrote, in any of its formats, without torch and without running anything."""

from __future__ import annotations

import os
from dataclasses import dataclass
from os import PathLike
from typing import BinaryIO, Final, Literal

from ckptflow.errors import (
    CorruptFileError,
    IncompleteCheckpointError,
    UnsupportedCheckpointError,
)
from ckptflow.torchfiles.lazy import LazyStorage
from ckptflow.torchfiles.legacy import is_legacy_start, read_legacy
from ckptflow.torchfiles.looks import HEAD_BYTES, not_a_torch_file
from ckptflow.torchfiles.pickles import load_pickle, no_ints, no_persistent_load
from ckptflow.torchfiles.storages import ZipStorages, read_ints
from ckptflow.torchfiles.zipfiles import LOCAL_MAGIC, ZipArchive, read_record, read_zip_directory, truncated_zip

# What torch calls the directory in the zip where it was given a stream or a name that is not ASCII.
_UNNAMED: Final = "archive/"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile:
    """An open torch file.

    Attributes:
        path: the file.
        format: ``zip`` (torch 1.6 and later) or ``legacy``.
        value: the saved object: dicts, lists, plain values, LazyTensor, DTensor, ShardedTensor, Stub…
        storages: all storages that the object refers to, in the order met.
        foreign_globals: sorted ``module.name`` of classes that are neither Python's nor torch's nor NumPy's.
        pickle_offset: where the object's pickle starts in the file, in bytes.
        pickle_nbytes: its length.
        offset: where the torch file starts inside ``path``, in bytes.
        length: its length.
        saved_as: the name, without suffix, of the file that torch.save wrote; None where the file doesn't tell.
    """

    path: str
    format: Literal["zip", "legacy"]
    value: object
    storages: tuple[LazyStorage, ...]
    foreign_globals: tuple[str, ...]
    pickle_offset: int
    pickle_nbytes: int
    offset: int
    length: int
    saved_as: str | None

    def read_archive(self) -> ZipArchive | None:
        """Reads the directory of the zip again: all records by name; None for a legacy file.

        It isn't kept, as it would take 250 bytes per tensor.

        Raises:
            CheckpointError: as ``open_torch_file``, when the file has changed since.
        """
        if self.format == "legacy":
            return None
        with open(self.path, "rb") as file:
            return read_zip_directory(file, self.path, offset=self.offset, length=self.length)


def open_torch_file(path: str | PathLike[str], *, offset: int = 0, length: int | None = None) -> TorchFile:
    """Reads the structure of a torch file, not its tensor data.

    Args:
        path: the file.
        offset: where the torch file starts inside it, in bytes (DCP packs many into one).
        length: its length in bytes; None for up to the end.

    Raises:
        IncompleteCheckpointError: the file is missing, truncated or still being written.
        CorruptFileError: it does not parse.
        UnsafeFileError: it asks for code to run, or for absurd sizes.
        UnsupportedCheckpointError: a kind of torch file that holds no plain tensors, by name.
    """
    name = os.fspath(path)
    try:
        file = open(name, "rb")  # noqa: SIM115 - closed by the with statement below
    except FileNotFoundError as error:
        raise IncompleteCheckpointError("a file is missing", file=name) from error
    except IsADirectoryError as error:
        raise CorruptFileError("a directory is where a torch file should be", file=name) from error
    with file:
        size = os.fstat(file.fileno()).st_size
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IncompleteCheckpointError(
                "the file is truncated or still being written",
                file=name,
                expected=f"at least {offset + length} bytes",
                found=f"{size} bytes",
            )
        return _open(file, name, offset, length)


def read_pickle(data: bytes, name: str) -> object:
    """Reads a bare pickle, such as DCP's ``.metadata``, with stubs for all classes.

    Args:
        data: the pickle.
        name: the file it came from, for messages.

    Raises:
        CorruptFileError, UnsafeFileError: as ``open_torch_file``.
    """
    return load_pickle(data, name, no_persistent_load, no_ints)[0]


def _open(file: BinaryIO, name: str, offset: int, length: int) -> TorchFile:
    head = os.pread(file.fileno(), min(HEAD_BYTES, length), offset)
    if head.startswith(LOCAL_MAGIC):
        return _open_zip(file, name, offset, length)
    if is_legacy_start(head):
        return _open_legacy(file, name, offset, length)
    if head and LOCAL_MAGIC.startswith(head):
        raise truncated_zip(name)
    raise not_a_torch_file(head, length, name)


def _open_zip(file: BinaryIO, name: str, offset: int, length: int) -> TorchFile:
    archive = read_zip_directory(file, name, offset=offset, length=length)
    prefix = _torch_prefix(archive)
    record = archive.records[f"{prefix}data.pkl"]
    byteorder = archive.records.get(f"{prefix}byteorder")
    if byteorder is not None:
        order = read_record(file, byteorder, name) if byteorder.nbytes < HEAD_BYTES else b"?"
        if order != b"little":
            raise UnsupportedCheckpointError(
                "the file was saved on a machine of another byte order", file=name, expected="little", found=order
            )
    storages = ZipStorages(archive, prefix)
    value, foreign = load_pickle(
        read_record(file, record, name), name, storages.persistent_load, lambda tensor: read_ints(file, tensor)
    )
    return TorchFile(
        path=name,
        format="zip",
        value=value,
        storages=tuple(storages.by_key.values()),
        foreign_globals=foreign,
        pickle_offset=record.offset,
        pickle_nbytes=record.nbytes,
        offset=offset,
        length=length,
        saved_as=None if prefix == _UNNAMED else prefix[:-1],
    )


def _torch_prefix(archive: ZipArchive) -> str:
    """The directory in the zip that all records lie in, ``archive/`` or the file's name."""
    first = next(iter(archive.records), "")
    prefix = first.partition("/")[0] + "/"
    if f"{prefix}constants.pkl" in archive.records:
        raise UnsupportedCheckpointError(
            "the file is a TorchScript program (torch.jit.save), not a checkpoint",
            file=archive.path,
            fix="save the state_dict of the model instead",
        )
    if f"{prefix}data.pkl" not in archive.records:
        raise CorruptFileError(
            "a zip file, but not one that torch.save wrote",
            file=archive.path,
            expected=f"a record {prefix}data.pkl",
            found=f"{len(archive.records)} records, the first one {first[:100]!r}",
        )
    return prefix


def _open_legacy(file: BinaryIO, name: str, offset: int, length: int) -> TorchFile:
    content = read_legacy(file, name, offset=offset, length=length)
    return TorchFile(
        path=name,
        format="legacy",
        value=content.value,
        storages=content.storages,
        foreign_globals=content.foreign_globals,
        pickle_offset=content.pickle_offset,
        pickle_nbytes=content.pickle_nbytes,
        offset=offset,
        length=length,
        saved_as=None,
    )
