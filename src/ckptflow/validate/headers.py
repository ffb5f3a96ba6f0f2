"""The output's weight files as their own headers describe them, read with nothing but the standard library.

Format: https://github.com/huggingface/safetensors#format. This is not the code that wrote the files, on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ckptflow.dtypes import BY_CODE, DType
from ckptflow.errors import CorruptFileError
from ckptflow.files.jsonfiles import parse_json_object
from ckptflow.tensors import Shape

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library refuses longer headers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a weight file.

    Attributes:
        file: the weight file.
        dtype: element type.
        shape: in elements.
        begin: byte offset in the file, from its start.
        nbytes: bytes in the file.
    """

    file: Path
    dtype: DType
    shape: Shape
    begin: int
    nbytes: int


def weight_files(directory: Path) -> list[Path]:
    """All safetensors files of a directory, in name order."""
    return sorted(path for path in directory.glob("*.safetensors") if path.is_file())


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one weight file, in file order.

    Raises:
        CorruptFileError: the header is no header, or it does not describe the file to its last byte.
    """
    with open(path, "rb") as file:
        return parse_header(path, path.stat().st_size, lambda _, count: file.read(count))


def parse_header(path: Path, size: int, read: Callable[[int, int], bytes]) -> dict[str, StoredTensor]:
    """The tensors of one weight file, wherever it lies, in file order.

    Args:
        path: what the file is called.
        size: its bytes.
        read: gives bytes of it by offset and count; it is asked from the start on, without holes.

    Raises:
        CorruptFileError: the header is no header, or it does not describe the file to its last byte.
    """
    length = int.from_bytes(read(0, min(8, size)), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise CorruptFileError("not a safetensors header", file=path, expected=f"a length below {size}", found=length)
    header = parse_json_object(read(8, length), path)
    header.pop("__metadata__", None)
    tensors = {fqn: _stored(fqn, entry, path, 8 + length) for fqn, entry in header.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)))
    position = 8 + length
    for fqn, tensor in ordered.items():
        if tensor.begin != position:
            raise CorruptFileError(
                "tensors overlap or leave a hole", file=path, tensor=fqn, expected=position, found=tensor.begin
            )
        position += tensor.nbytes
    if position != size:
        raise CorruptFileError(
            "the header and the size of a weight file disagree", file=path, expected=position, found=size
        )
    return ordered


def _stored(fqn: str, entry: Any, path: Path, data_begin: int) -> StoredTensor:
    try:
        dtype = BY_CODE[entry["dtype"]]
        shape = tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(
            "a header entry does not parse", file=path, tensor=fqn, found=repr(entry)[:200]
        ) from error
    if min((*shape, begin), default=0) < 0 or end - begin != prod(shape) * dtype.itemsize:
        raise CorruptFileError(
            "a tensor's bytes don't fit its shape",
            file=path,
            tensor=fqn,
            expected=f"{prod(shape) * dtype.itemsize} bytes for {dtype} {list(shape)}",
            found=end - begin,
        )
    return StoredTensor(file=path, dtype=dtype, shape=shape, begin=data_begin + begin, nbytes=end - begin)


def bytes_by_dtype(tensors: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Bytes of tensor data by dtype name, most first."""
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.dtype.name] = sizes.get(tensor.dtype.name, 0) + tensor.nbytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))
