"""Reads what a safetensors file says about its tensors, and holds it to the format's rules.

Format: https://github.com/huggingface/safetensors#format: u64 header length (little endian), JSON header, data. The
header's offsets must tile the data without holes, so a file that was cut short or grown is found here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptflow.dtypes import BY_CODE, DType
from ckptflow.errors import CorruptFileError, IncompleteCheckpointError, UnsafeFileError, UnsupportedCheckpointError
from ckptflow.files.jsonfiles import parse_json_object
from ckptflow.formats.files import checked_file
from ckptflow.tensors import SourceFile, TensorSource, whole

LENGTH_BYTES = 8
# The safetensors library's own limit (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
MAX_HEADER_BYTES = 100_000_000
# A list or object costs 20 times its two characters once parsed. Real headers have one per 16 bytes or fewer.
SMALL_HEADER_BYTES = 1_000_000
HEADER_BYTES_PER_OPENER = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsFile:
    """The header of one file.

    Attributes:
        file: the file.
        tensors: name → where its bytes are, in the order of the data.
        metadata: the free strings of ``__metadata__``.
    """

    file: SourceFile
    tensors: Mapping[str, TensorSource]
    metadata: Mapping[str, str]


def read_safetensors(path: Path, root: Path) -> SafetensorsFile:
    """Read and check the header; no tensor data is read.

    Raises:
        IncompleteCheckpointError: missing, empty, or shorter than the header says.
        CorruptFileError: not a safetensors file, or one that contradicts itself.
        UnsafeFileError: a link out of ``root``, or a header of absurd size.
        UnsupportedCheckpointError: a dtype that ckptflow doesn't know.
    """
    file = checked_file(path, root)
    header, data_start = _read_header(file)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptFileError("__metadata__ of a safetensors file is not a map of strings", file=path)
    entries = [_entry(name, entry, path) for name, entry in header.items()]
    entries.sort(key=lambda e: e[3:])
    _check_data(entries, file, data_start)
    tensors = {name: whole(file, data_start + begin, shape, dtype) for name, shape, dtype, begin, _ in entries}
    return SafetensorsFile(file=file, tensors=tensors, metadata=metadata)


def starts_as_safetensors(path: Path) -> bool:
    """Whether a file begins with a length and a JSON object of that length, by its first bytes."""
    with open(path, "rb") as stream:
        head = stream.read(LENGTH_BYTES + 1)
    nbytes = int.from_bytes(head[:LENGTH_BYTES], "little")
    return head[LENGTH_BYTES:] == b"{" and nbytes <= min(MAX_HEADER_BYTES, path.stat().st_size - LENGTH_BYTES)


def _read_header(file: SourceFile) -> tuple[dict[str, Any], int]:
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        start = os.pread(fd, LENGTH_BYTES, 0)
        if len(start) < LENGTH_BYTES:
            raise _short(file, LENGTH_BYTES)
        nbytes = int.from_bytes(start, "little")
        if nbytes == 0:
            raise IncompleteCheckpointError(
                "the file starts with zeros: its space was reserved and never written",
                file=file.path,
                expected="a safetensors file",
            )
        if nbytes > MAX_HEADER_BYTES:
            if start.isascii() and start.lstrip()[:1] in (b"<", b"{", b"v"):
                # A page of HTML, bare JSON, or a Git LFS pointer ("version https://…").
                raise CorruptFileError("not a safetensors file but text", file=file.path, found=repr(start))
            raise UnsafeFileError(
                "the header of a safetensors file claims an absurd length",
                file=file.path,
                expected=f"at most {MAX_HEADER_BYTES} bytes",
                found=f"{nbytes} bytes",
            )
        if LENGTH_BYTES + nbytes > file.nbytes:
            raise _short(file, LENGTH_BYTES + nbytes)
        header = os.pread(fd, nbytes, LENGTH_BYTES)
    finally:
        os.close(fd)
    if len(header) < nbytes:
        raise _short(file, LENGTH_BYTES + nbytes)
    openers = header.count(b"[") + header.count(b"{")
    if nbytes > SMALL_HEADER_BYTES and openers * HEADER_BYTES_PER_OPENER > nbytes:
        raise UnsafeFileError(
            "the header of a safetensors file is a JSON bomb", file=file.path, found=f"{openers} lists"
        )
    return parse_json_object(header, file.path), LENGTH_BYTES + nbytes


_Entry = tuple[str, tuple[int, ...], DType, int, int]
"""Name, shape, dtype, begin and end in the data, in bytes."""


def _entry(name: str, entry: object, path: Path) -> _Entry:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CorruptFileError("an entry of a safetensors header is malformed", file=path, tensor=name)
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or not isinstance(code, str):
        raise CorruptFileError("an entry of a safetensors header is malformed", file=path, tensor=name, found=entry)
    dtype = BY_CODE.get(code)
    if dtype is None:
        raise UnsupportedCheckpointError(
            "unknown dtype in a safetensors file", file=path, tensor=name, expected=", ".join(BY_CODE), found=code
        )
    begin, end = offsets
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise CorruptFileError(
            "shape and dtype of a tensor don't fit its bytes",
            file=path,
            tensor=name,
            expected=f"{math.prod(shape) * dtype.itemsize} bytes for {code} {shape}",
            found=f"{end - begin} bytes",
        )
    return name, tuple(shape), dtype, begin, end


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _check_data(entries: list[_Entry], file: SourceFile, data_start: int) -> None:
    """The data must be tiled: no overlap, no hole, to the end of the file."""
    at, before = 0, None
    for name, _, _, begin, end in entries:
        if begin != at:
            raise CorruptFileError(
                "two tensors of a safetensors file overlap" if begin < at else "a hole between two tensors of a file",
                file=file.path,
                tensor=name,
                expected=f"to begin at byte {at} of the data" + (f", where {before} ends" if before else ""),
                found=f"byte {begin}",
            )
        at, before = end, name
    if data_start + at > file.nbytes:
        raise _short(file, data_start + at)
    if data_start + at < file.nbytes:
        raise CorruptFileError(
            "bytes after the last tensor of a safetensors file",
            file=file.path,
            expected=f"{data_start + at} bytes",
            found=f"{file.nbytes} bytes",
        )


def _short(file: SourceFile, expected: int) -> IncompleteCheckpointError:
    return IncompleteCheckpointError(
        "a safetensors file is shorter than its header says",
        file=file.path,
        expected=f"{expected} bytes" if expected > LENGTH_BYTES else "a header",
        found=f"{file.nbytes} bytes",
        fix="wait until the save has finished, or copy the file again",
    )
