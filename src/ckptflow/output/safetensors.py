"""The header of a safetensors weight file.

Format: 8 bytes little-endian header length, JSON header, then the tensors without holes
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json

from ckptflow.errors import UnsupportedCheckpointError, UsageError
from ckptflow.plan import PlannedTensor, WeightFile

DATA_ALIGNMENT_BYTES = 4096
"""The tensors begin at a multiple of this, so that whole disk blocks can be written past the page cache."""

_METADATA = "__metadata__"

HEADER_LIMIT_BYTES = 100_000_000
"""The safetensors library refuses longer headers."""


def tensor_offsets(file: WeightFile) -> list[int]:
    """Where each tensor begins in the data section, in bytes, and last the size of the section."""
    offsets = [0]
    for tensor in file.tensors:
        offsets.append(offsets[-1] + tensor.nbytes)
    return offsets


def weight_file_header(file: WeightFile) -> bytes:
    """All bytes before the first tensor: length, JSON, and spaces up to the alignment.

    Raises:
        UsageError: two tensors have one name, or a name that the format keeps for itself.
        UnsupportedCheckpointError: a dtype or name that the format can't hold, or a header that is too long.
    """
    names: set[str] = {_METADATA}
    entries = [f'"{_METADATA}":{{"format":"pt"}}']
    offsets = tensor_offsets(file)
    for tensor, begin, end in zip(file.tensors, offsets, offsets[1:], strict=False):
        if tensor.fqn in names:
            raise UsageError("two tensors of a weight file have one name", file=file.name, tensor=tensor.fqn)
        names.add(tensor.fqn)
        shape = ",".join(map(str, tensor.shape))
        name = json.dumps(tensor.fqn, ensure_ascii=False)
        entries.append(f'{name}:{{"dtype":"{_code(tensor)}","shape":[{shape}],"data_offsets":[{begin},{end}]}}')
    try:
        text = f"{{{','.join(entries)}}}".encode()
    except UnicodeEncodeError as error:
        found = repr(error.object[error.start : error.end])
        raise UnsupportedCheckpointError("a tensor's name is not valid Unicode", file=file.name, found=found) from error
    length = -(-(8 + len(text)) // DATA_ALIGNMENT_BYTES) * DATA_ALIGNMENT_BYTES - 8
    if length > HEADER_LIMIT_BYTES:
        raise UnsupportedCheckpointError(
            "the header of a weight file is too long for safetensors",
            file=file.name,
            expected=f"at most {HEADER_LIMIT_BYTES} bytes",
            found=f"{length} bytes for {len(file.tensors)} tensors",
            fix="use a smaller --max-shard-size",
        )
    return length.to_bytes(8, "little") + text.ljust(length)


def _code(tensor: PlannedTensor) -> str:
    if tensor.dtype.code is None:
        raise UnsupportedCheckpointError("safetensors has no such dtype", tensor=tensor.fqn, found=tensor.dtype.name)
    return tensor.dtype.code
