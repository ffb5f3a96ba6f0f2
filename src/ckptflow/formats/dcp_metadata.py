"""What DCP's ``.metadata`` says: tensors, their chunks, and where each chunk lies in which file.

Format: ``torch.distributed.checkpoint.metadata.Metadata`` pickled by ``FileSystemWriter.finish``
(https://github.com/pytorch/pytorch/blob/main/torch/distributed/checkpoint/filesystem.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

from ckptflow.dtypes import DType, dtype_named
from ckptflow.errors import CorruptFileError, UnsafeFileError, UnsupportedCheckpointError
from ckptflow.tensors import Shape
from ckptflow.torchfiles import Stub, read_pickle, stub_name, stub_state
from ckptflow.torchfiles.dtypes import TorchDtype

TreePath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpRecord:
    """One entry of a data file.

    Attributes:
        file_name: path of the file, relative to the checkpoint directory; checked to stay inside it.
        offset_bytes: where the entry starts in the file.
        nbytes: its length, with the container that ``torch.save`` puts around the values.
        transforms: names of stream transforms (compression) that were applied, innermost last.
    """

    file_name: str
    offset_bytes: int
    nbytes: int
    transforms: tuple[str, ...] = ()

    @property
    def end_bytes(self) -> int:
        """The first byte after the entry."""
        return self.offset_bytes + self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpChunk:
    """A box of a global tensor (elements) and the entry that holds it."""

    offsets: Shape
    sizes: Shape
    record: DcpRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpTensor:
    """A global tensor; chunks without elements are left out."""

    shape: Shape
    dtype: DType
    chunks: tuple[DcpChunk, ...]

    @property
    def record_bytes(self) -> int:
        """Bytes of all its entries."""
        return sum(chunk.record.nbytes for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpMetadata:
    """A parsed ``.metadata``.

    Attributes:
        tensors: flat key → tensor.
        blobs: flat key → entry of a value that is no tensor (``torch.save`` of anything).
        paths: flat key → its path in the nested state dict that was saved; only keys that the planner recorded.
        file_ends: file name → first byte after its last entry.
        checkpoint_id: path that the trainer saved to, if recorded.
    """

    tensors: Mapping[str, DcpTensor]
    blobs: Mapping[str, DcpRecord]
    paths: Mapping[str, TreePath]
    file_ends: Mapping[str, int]
    checkpoint_id: PurePosixPath | None

    def path_of(self, key: str) -> TreePath:
        """Path of a key in the nested state dict; the key itself where the planner recorded none."""
        return self.paths.get(key, (key,))


def parse_metadata(data: bytes, path: Path) -> DcpMetadata:
    """Read the bytes of a ``.metadata`` file; ``path`` is for messages.

    Raises:
        CorruptFileError: it does not parse, or is not DCP's metadata.
        UnsafeFileError: it names files outside the checkpoint directory.
        UnsupportedCheckpointError: it holds something that this reader doesn't know, by name.
    """
    return _Parser(path).parse(read_pickle(data, str(path)))


class _Parser:
    """Turns stubs into records; every type is checked, since the pickle can hold anything."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: set[str] = set()

    def parse(self, value: object) -> DcpMetadata:
        if not stub_name(value).endswith("checkpoint.metadata.Metadata"):
            self.corrupt("the pickle is not DCP's metadata", expected="a Metadata object", found=stub_name(value))
        state = stub_state(value)
        records = self.records(state.get("storage_data"))
        ends: dict[str, int] = {}
        # Shards without elements have entries too, which may be the last of a file.
        for record in records.values():
            ends[record.file_name] = max(ends.get(record.file_name, 0), record.end_bytes)
        tensors: dict[str, DcpTensor] = {}
        blobs: dict[str, DcpRecord] = {}
        for key, entry in self.mapping(state.get("state_dict_metadata"), "state_dict_metadata").items():
            fqn = self.text(key, "a key")
            kind = stub_name(entry).rpartition(".")[2]
            if kind == "TensorStorageMetadata":
                tensors[fqn] = self.tensor(fqn, stub_state(entry), records)
            elif kind == "BytesStorageMetadata":
                found = records.pop((fqn, None), None)
                if found is None:
                    self.corrupt("an entry has no place in any file", tensor=fqn)
                blobs[fqn] = found
            else:
                raise UnsupportedCheckpointError("unknown kind of DCP entry", file=self.path, tensor=fqn, found=kind)
        if records:
            fqn, offsets = next(iter(records))
            self.corrupt("a stored chunk belongs to no tensor", tensor=fqn, found=f"offsets {offsets}")
        return DcpMetadata(
            tensors=tensors,
            blobs=blobs,
            paths=self.paths(state.get("planner_data")),
            file_ends=ends,
            checkpoint_id=self.checkpoint_id(state.get("storage_meta")),
        )

    def records(self, value: object) -> dict[tuple[str, Shape | None], DcpRecord]:
        found: dict[tuple[str, Shape | None], DcpRecord] = {}
        for index, info in self.mapping(value, "storage_data").items():
            if stub_name(info).rpartition(".")[2] != "_StorageInfo":
                raise UnsupportedCheckpointError(
                    "the chunks are stored by a writer that ckptflow doesn't know",
                    file=self.path,
                    expected="torch.distributed.checkpoint.filesystem._StorageInfo",
                    found=stub_name(info),
                )
            where = stub_state(index)
            offset = where.get("offset")
            place = (
                self.text(where.get("fqn"), "a key of storage_data"),
                None if offset is None else self.sizes(offset, "an offset"),
            )
            if place in found:
                self.corrupt("two places for one chunk", tensor=place[0], found=f"offsets {place[1]}")
            found[place] = self.record(stub_state(info))
        return found

    def record(self, info: Mapping[str, object]) -> DcpRecord:
        name = self.text(info.get("relative_path"), "a file name")
        if name not in self.names:
            self.check_name(name)
            self.names.add(name)
        transforms = info.get("transform_descriptors") or ()
        names = tuple(str(t) for t in transforms) if isinstance(transforms, list | tuple) else (str(transforms),)
        offset, nbytes = self.count(info.get("offset"), "an offset"), self.count(info.get("length"), "a length")
        return DcpRecord(file_name=name, offset_bytes=offset, nbytes=nbytes, transforms=names)

    def check_name(self, name: str) -> None:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            raise UnsafeFileError(
                "the metadata names a file outside the checkpoint", file=self.path, expected="a plain name", found=name
            )

    def tensor(
        self, fqn: str, entry: Mapping[str, object], records: dict[tuple[str, Shape | None], DcpRecord]
    ) -> DcpTensor:
        shape = self.sizes(entry.get("size"), "a tensor size")
        boxes = entry.get("chunks")
        if not isinstance(boxes, list | tuple):
            self.corrupt("a tensor has no list of chunks", tensor=fqn, found=type(boxes).__name__)
        chunks = []
        for box in boxes:
            offsets = self.sizes(stub_state(box).get("offsets"), "chunk offsets")
            sizes = self.sizes(stub_state(box).get("sizes"), "chunk sizes")
            if not len(offsets) == len(sizes) == len(shape):
                self.corrupt("a chunk has another rank than its tensor", tensor=fqn, expected=shape, found=sizes)
            record = records.pop((fqn, offsets), None)
            if 0 in sizes:
                continue
            if record is None:
                self.corrupt("a chunk has no place in any file", tensor=fqn, found=f"offsets {list(offsets)}")
            chunks.append(DcpChunk(offsets=offsets, sizes=sizes, record=record))
        return DcpTensor(shape=shape, dtype=self.dtype(fqn, entry.get("properties")), chunks=tuple(chunks))

    def dtype(self, fqn: str, properties: object) -> DType:
        # TensorProperties.__getstate__ is (dtype, layout, requires_grad, memory format, pin_memory).
        state = properties.state if isinstance(properties, Stub) else None
        named = stub_state(properties).get("dtype") if not isinstance(state, tuple) else state[0] if state else None
        layout = state[1] if isinstance(state, tuple) and len(state) > 1 else None
        layout_name = " ".join(map(str, layout.args)) if isinstance(layout, Stub) else str(layout)
        if "sparse" in layout_name:
            raise UnsupportedCheckpointError("a tensor is not dense", file=self.path, tensor=fqn, found=layout_name)
        if not isinstance(named, TorchDtype):
            self.corrupt("a tensor has no dtype", tensor=fqn, found=type(named).__name__)
        return dtype_named(named.name)

    def paths(self, value: object) -> dict[str, TreePath]:
        if not isinstance(value, dict):
            return {}
        found: dict[str, TreePath] = {}
        for key, path in value.items():
            plain = isinstance(path, tuple | list) and path and all(isinstance(part, str | int) for part in path)
            if isinstance(key, str) and plain:
                found[key] = tuple(path)
        return found

    def checkpoint_id(self, storage_meta: object) -> PurePosixPath | None:
        value = stub_state(storage_meta).get("checkpoint_id")
        return PurePosixPath(value) if isinstance(value, str) and value else None

    def mapping(self, value: object, what: str) -> dict[object, object]:
        if not isinstance(value, dict):
            self.corrupt(f"{what} is not a dict", found=type(value).__name__)
        return value

    def text(self, value: object, what: str) -> str:
        if not isinstance(value, str):
            self.corrupt(f"{what} is not a string", found=type(value).__name__)
        return value

    def count(self, value: object, what: str) -> int:
        if type(value) is not int or value < 0:
            self.corrupt(f"{what} is not a count", found=value)
        return value

    def sizes(self, value: object, what: str) -> Shape:
        if not isinstance(value, tuple | list):
            self.corrupt(f"{what} is not a tuple", found=type(value).__name__)
        if not all(type(item) is int and item >= 0 for item in value):
            self.corrupt(f"{what} is not made of counts", found=value)
        return tuple(value)

    def corrupt(
        self, what: str, *, tensor: str | None = None, expected: object = None, found: object = None
    ) -> NoReturn:
        raise CorruptFileError(what, file=self.path, tensor=tensor, expected=expected, found=found)
