"""MXNet checkpoints: ``PREFIX-symbol.json`` with ``PREFIX-NNNN.params``, and Gluon's ``save_parameters`` files."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ckptflow.errors import CheckpointError, CorruptFileError, UnsupportedCheckpointError
from ckptflow.formats.base import Completeness, Location, ReadOptions
from ckptflow.formats.files import checked_file
from ckptflow.formats.mxnet_params import LIST_MAGIC, NDArray, ParamsFile, parse_params
from ckptflow.formats.mxnet_sparse import dense_source
from ckptflow.formats.verdicts import refused
from ckptflow.manifest import CheckpointManifest, LeftOut
from ckptflow.tensors import SourceFile, TensorSource, whole

# do_checkpoint pads the epoch to four digits; it grows past 9999.
_EPOCH_FILE = re.compile(r"^(?P<prefix>.+)-(?P<epoch>\d{4,})\.params$")
# Module's save_checkpoint marks arguments (weights) and auxiliary states (BatchNorm's moving mean and variance).
_KINDS = ("arg", "aux")


class MXNetParams:
    """One ``.params`` file; each epoch is a checkpoint of its own."""

    layout = "mxnet"
    supersedes: tuple[str, ...] = ()

    def find(self, path: Path) -> list[Location]:
        """The file itself, or every array list of a directory."""
        if path.suffix == ".params":
            names, folder = [path.name], path.parent
        else:
            folder = path
            try:
                names = sorted(name for name in os.listdir(path) if name.endswith(".params"))
            except OSError:
                return []
        return [
            Location(layout=self.layout, path=folder / name, root=folder)
            for name in names
            if _is_array_list(folder / name)
        ]

    def check(self, location: Location) -> Completeness:
        """Parses the file to its end: there is no checksum and no end mark, and the names come last."""
        try:
            parsed = _parse(location)
        except CheckpointError as error:
            return refused(error, location.path)
        return Completeness(state="complete", reason=f"{len(parsed.arrays)} arrays, and the file ends after the names")

    def read(self, location: Location, options: ReadOptions) -> CheckpointManifest:
        """Names without ``arg:`` and ``aux:``; ``kinds`` keeps them."""
        parsed = _parse(location)
        if not parsed.names:
            raise UnsupportedCheckpointError(
                "the arrays of this MXNet file have no names",
                file=location.path,
                expected="a dict of arrays",
                found=f"a list of {len(parsed.arrays)}",
                fix="save a dict: mx.nd.save(path, {name: array})",
            )
        tensors: dict[str, TensorSource] = {}
        kinds: dict[str, str] = {}
        left_out: list[LeftOut] = []
        for name, array in zip(parsed.names, parsed.arrays, strict=True):
            kind, fqn = _split_kind(name)
            if not fqn or fqn in tensors:
                raise CorruptFileError("two arrays have one name", file=location.path, tensor=fqn, found=name)
            if array is None:
                left_out.append(LeftOut(name=name, reason="an array without a shape: it was never initialised"))
                continue
            tensors[fqn] = _source(parsed.file, fqn, array)
            if kind:
                kinds[fqn] = kind
        return CheckpointManifest(
            layout=self.layout,
            path=location.path,
            tensors=tensors,
            kinds=kinds,
            left_out=tuple(left_out),
            files=(parsed.file,),
            storage_bytes=_storage_bytes(parsed),
            config_dir=options.config_dir,
            notes=_notes(location.path, parsed, bool(kinds)),
        )


def _parse(location: Location) -> ParamsFile:
    checked_file(location.path, location.root)
    return parse_params(location.path)


def _is_array_list(path: Path) -> bool:
    """Whether the file begins as an array list, or is too short to tell."""
    try:
        with open(path, "rb") as stream:
            head = stream.read(len(LIST_MAGIC))
    except OSError:
        return False
    return LIST_MAGIC.startswith(head) or head.startswith(b"PK\x03\x04")


def _split_kind(name: str) -> tuple[str | None, str]:
    kind, colon, rest = name.partition(":")
    return (kind, rest) if colon and kind in _KINDS else (None, name)


def _source(file: SourceFile, fqn: str, array: NDArray) -> TensorSource:
    if array.storage != "dense":
        return dense_source(file, fqn, array)
    return whole(file, array.values.offset_bytes, array.shape, array.values.dtype)


def _storage_bytes(parsed: ParamsFile) -> int:
    blocks = [block for array in parsed.arrays if array for block in (array.values, *array.indices)]
    return sum(TensorSource(block.shape, block.dtype, ()).nbytes for block in blocks)


def _notes(path: Path, parsed: ParamsFile, has_kinds: bool) -> tuple[str, ...]:
    notes = []
    epoch = _EPOCH_FILE.match(path.name)
    if epoch:
        notes.append(f"MXNet epoch {int(epoch['epoch'])}")
        symbol = path.with_name(f"{epoch['prefix']}-symbol.json")
        if has_kinds and not symbol.is_file():
            notes.append(f"{symbol.name} is not beside it: MXNet itself needs it to build the network")
    sparse = [
        name for name, array in zip(parsed.names, parsed.arrays, strict=True) if array and array.storage != "dense"
    ]
    if sparse:
        notes.append(f"made dense: {', '.join(sparse[:5])}" + (f" and {len(sparse) - 5} more" if sparse[5:] else ""))
    return tuple(notes)
