"""Says what a file that isn't a torch file looks like."""

from __future__ import annotations

from typing import Final

from ckptflow.errors import CheckpointError, CorruptFileError, IncompleteCheckpointError, UnsupportedCheckpointError

HEAD_BYTES: Final = 512
_TAR_MAGIC_AT: Final = 257

_STARTS: Final = (
    (b"\x89HDF", "an HDF5 file"),
    (b"GGUF", "a GGUF file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard file"),
    (b"BZh", "a bzip2 file"),
    (b"\xfd7zXZ", "an xz file"),
    (b"\x93NUMPY", "a NumPy array file"),
    (b"%PDF", "a PDF"),
    (b"\x7fELF", "a program"),
    (b"PK\x05\x06", "an empty zip file"),
    (b"\x80", "a pickle that torch.save didn't write"),
)


def not_a_torch_file(head: bytes, nbytes: int, path: str) -> CheckpointError:
    """The error for a file that starts with ``head`` (its first 512 bytes) and is ``nbytes`` long."""
    expected = "a file written by torch.save"
    if nbytes == 0:
        return CorruptFileError("the file is empty", file=path, expected=expected)
    if head.startswith(b"version https://git-lfs"):
        return IncompleteCheckpointError(
            "the file is a Git LFS pointer, not the data", file=path, expected=expected, fix="run git lfs pull"
        )
    if head[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar":
        return UnsupportedCheckpointError(
            "the file is a tar archive, the format of torch before 0.1.10",
            file=path,
            fix="load it with an old torch and save it again",
        )
    if not head.strip(b"\0"):
        return IncompleteCheckpointError(
            "the file starts with zeros: its space was reserved and never written", file=path, expected=expected
        )
    return CorruptFileError("not a torch file", file=path, expected=expected, found=_look(head))


def _look(head: bytes) -> str:
    for start, name in _STARTS:
        if head.startswith(start):
            return name
    if int.from_bytes(head[:8], "little") < 2**27 and head[8:9] == b"{":
        return "a safetensors file"
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "an HTML or XML page (a failed download?)"
    if text.startswith((b"{", b"[")):
        return "a JSON file"
    if all(byte >= 0x20 or byte in b"\t\n\r" for byte in head) and _is_utf8(head):
        return f"a text file: {head[:60].decode(errors='replace')!r}"
    return f"unknown bytes: {head[:16].hex(' ')}"


def _is_utf8(head: bytes) -> bool:
    try:
        # The head may end within a character of up to four bytes.
        head[: len(head) - 3 if len(head) == HEAD_BYTES else None].decode()
    except UnicodeDecodeError as error:
        return error.start >= len(head) - 7
    return True
