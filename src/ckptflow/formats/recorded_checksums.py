"""Where the torch files of a checkpoint record checksums: their zip directories, read when they are asked for."""

from __future__ import annotations

from pathlib import Path

from ckptflow.formats.dcp_checks import DATA_SUFFIX, METADATA, read_metadata
from ckptflow.tensors import SourceFile
from ckptflow.torchfiles.checksums import ChecksumTable
from ckptflow.torchfiles.zipfiles import LOCAL_MAGIC, ZipRecord, read_zip_directory


class RecordedChecksums:
    """The tables of a checkpoint's files, each read once; files of other kinds record no checksums."""

    def __init__(self) -> None:
        self._tables: dict[str, ChecksumTable] = {}
        self._entries: dict[Path, dict[str, list[tuple[int, int]]]] = {}

    def of(self, file: SourceFile) -> ChecksumTable:
        """The table of one file, empty where it records none.

        Raises:
            CheckpointError: the file is not any more what its metadata was read from.
        """
        table = self._tables.get(file.path)
        if table is None:
            table = self._tables[file.path] = ChecksumTable(self._records(file))
        return table

    def _records(self, file: SourceFile) -> list[ZipRecord]:
        with open(file.path, "rb") as stream:
            if stream.read(len(LOCAL_MAGIC)) != LOCAL_MAGIC:
                return []
            records: list[ZipRecord] = []
            for offset, nbytes in self._zips(file):
                records += read_zip_directory(stream, file.path, offset=offset, length=nbytes).records.values()
            return records

    def _zips(self, file: SourceFile) -> list[tuple[int, int]]:
        """Offset and length in bytes of the torch files in a file. A ``.distcp`` holds one for each entry."""
        if not file.path.endswith(DATA_SUFFIX):
            return [(0, file.nbytes)]
        directory = next((p for p in Path(file.path).parents if (p / METADATA).is_file()), None)
        if directory is None:
            return []
        if directory not in self._entries:
            self._entries[directory] = _dcp_entries(directory)
        return self._entries[directory].get(file.path, [])


def _dcp_entries(directory: Path) -> dict[str, list[tuple[int, int]]]:
    """Path of a data file → where its entries lie, as ``.metadata`` tells."""
    entries: dict[str, list[tuple[int, int]]] = {}
    metadata = read_metadata(directory, directory)
    for record in (chunk.record for tensor in metadata.tensors.values() for chunk in tensor.chunks):
        entries.setdefault(str(directory / record.file_name), []).append((record.offset_bytes, record.nbytes))
    return entries
