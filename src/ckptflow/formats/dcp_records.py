"""Entries of DCP data files as tensor sources: each entry is a small torch file of its own inside a ``.distcp``."""

from __future__ import annotations

import os
from pathlib import Path

from ckptflow.errors import IncompleteCheckpointError, InconsistentCheckpointError, UnsupportedCheckpointError
from ckptflow.formats.dcp_metadata import DcpChunk, DcpRecord, DcpTensor
from ckptflow.formats.files import checked_file
from ckptflow.formats.torch_tensors import TENSOR_TYPES, kind_of_tensor, not_plain, plain_tensor, storage_use
from ckptflow.tensors import Piece, SourceFile, TensorSource, check_tiling
from ckptflow.torchfiles import LazyTensor, open_torch_file, stub_name

STALE = (
    "the .metadata and the data files may be of different saves; let the trainer write the checkpoint again, or copy "
    "it again as a whole"
)


class DcpFiles:
    """The data files of one checkpoint directory.

    Args:
        directory: where ``.metadata`` is.
        root: directory that no file may lie outside of, links followed.
    """

    def __init__(self, directory: Path, root: Path) -> None:
        self._directory = directory
        self._root = root
        self._files: dict[str, SourceFile] = {}
        self.storage_bytes = 0
        self.wasted_bytes = 0

    @property
    def used(self) -> tuple[SourceFile, ...]:
        """Files that tensors were read from, by name."""
        return tuple(self._files[name] for name in sorted(self._files))

    def file(self, name: str) -> SourceFile:
        """The data file of that name.

        Raises:
            IncompleteCheckpointError: it is missing.
            UnsafeFileError: it is a link that leads out of the checkpoint.
        """
        if name not in self._files:
            self._files[name] = checked_file(self._directory / name, self._root)
        return self._files[name]

    def source(self, fqn: str, tensor: DcpTensor) -> TensorSource:
        """The global tensor, with one piece per chunk.

        Raises:
            InconsistentCheckpointError: an entry holds another tensor than the metadata says, or chunks don't tile.
            CorruptFileError, IncompleteCheckpointError: an entry does not parse.
            UnsupportedCheckpointError: an entry is compressed or quantized.
        """
        pieces = []
        for chunk in tensor.chunks:
            file, values = self.file(chunk.record.file_name), self._tensor(fqn, chunk.record)
            self._check(fqn, tensor, chunk, values)
            total, wasted = storage_use([values])
            self.storage_bytes += total
            self.wasted_bytes += wasted
            pieces.append(Piece(file, values.byte_offset, values.strides, chunk.offsets, chunk.sizes))
        source = TensorSource(tensor.shape, tensor.dtype, tuple(pieces))
        check_tiling(fqn, source)
        return source

    def _tensor(self, fqn: str, record: DcpRecord) -> LazyTensor:
        file = self.file(record.file_name)
        if record.transforms:
            raise UnsupportedCheckpointError(
                "the entries were written through a stream transform",
                file=file.path,
                tensor=fqn,
                expected="plain torch.save entries",
                found=", ".join(record.transforms),
                fix="save without extensions, or load and save again with torch.distributed.checkpoint",
            )
        if record.end_bytes > file.nbytes:
            raise IncompleteCheckpointError(
                "a data file is too short",
                file=file.path,
                tensor=fqn,
                expected=f"at least {record.end_bytes} bytes",
                found=f"{file.nbytes} bytes",
                fix="wait until it is written, or take another checkpoint",
            )
        opened = open_torch_file(file.path, offset=record.offset_bytes, length=record.nbytes)
        if (kind := kind_of_tensor(opened.value)) is not None:
            raise not_plain(fqn, kind, file.path)
        if not isinstance(opened.value, TENSOR_TYPES):
            raise InconsistentCheckpointError(
                "an entry holds no tensor", file=file.path, tensor=fqn, found=stub_name(opened.value), fix=STALE
            )
        return plain_tensor(fqn, opened.value, file.path)

    def scalar_bytes(self, fqn: str, tensor: DcpTensor) -> bytes:
        """The value of a tensor with one element, as it lies in the file."""
        values = self._tensor(fqn, tensor.chunks[0].record)
        self._check(fqn, tensor, tensor.chunks[0], values)
        fd = os.open(values.storage.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, values.itemsize, values.byte_offset)
        finally:
            os.close(fd)

    def _check(self, fqn: str, tensor: DcpTensor, chunk: DcpChunk, values: LazyTensor) -> None:
        expected = (tuple(chunk.sizes), tensor.dtype.name)
        if (values.shape, values.dtype_name) != expected:
            raise InconsistentCheckpointError(
                "an entry holds another tensor than .metadata says",
                file=values.storage.path,
                tensor=fqn,
                expected=f"shape {list(expected[0])}, {expected[1]}",
                found=f"shape {list(values.shape)}, {values.dtype_name}",
                fix=STALE,
            )
