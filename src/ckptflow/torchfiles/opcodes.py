"""Walks over the opcodes of a pickle before it is loaded, so that absurd requests never reach the unpickler.

CPython's unpickler allocates what an opcode asks for: one memo index of 2**31 costs 32 GB, one length of 2**60 an
exception of the wrong kind. The walk also finds where a pickle ends, which the unpickler doesn't tell exactly.
Opcodes: https://github.com/python/cpython/blob/3.11/Lib/pickletools.py
"""

from __future__ import annotations

import re
from typing import Final

from ckptflow.errors import CorruptFileError, UnsafeFileError

MAX_PICKLE_BYTES: Final = 2**30
# Opcodes of a byte or two that make a container by themselves take up to 236 bytes of memory (a set), all others up to
# 60 for each byte of theirs (measured); strings only their own. Both bounds together are 31 GB. Of the 138 bytes of a
# shard in DCP's metadata 124 are opcodes, six of which make containers: 3 million shards.
MAX_OPCODE_BYTES: Final = 380_000_000
MAX_CONTAINERS: Final = 2**25
_CONTAINERS: Final = (b"]", b"}", b"\x85", b"\x8f", b"\x91")
MAX_PROTOCOL: Final = 5

# Opcodes with arguments of fixed size that can do no harm, at C speed. Memo indices below 2**22 among them.
_FIXED: Final = rb"[()012NRabdel\]oQstu}\x81\x85-\x89\x8f-\x94]|[Kqh].|r..[\x00-\x3f]\x00|M..|[Jj]....|G........"
# Texts of up to eight bytes too (storage keys).
_SHORT: Final = b"|".join(b"X\\x%02x\\x00{3}.{%d}|\\x8c\\x%02x.{%d}" % (size, size, size, size) for size in range(1, 9))
_RUN: Final = re.compile(b"(?:%s|%s)*+" % (_FIXED, _SHORT), re.DOTALL)
# Opcode -> bytes of the length in front of its data.
_COUNTED: Final = {
    ord("X"): 4,
    ord("T"): 4,
    ord("B"): 4,
    ord("U"): 1,
    ord("C"): 1,
    0x8A: 1,
    0x8B: 4,
    0x8C: 1,
    0x8D: 8,
    0x8E: 8,
    0x96: 8,
}
# Opcode -> lines of text behind it.
_LINES: Final = {**dict.fromkeys(b"ILFSVgp", 1), ord("c"): 2, ord("i"): 2}
_REFUSED: Final = {
    ord("P"): "a persistent id in text",
    0x82: "an entry of the extension registry",
    0x83: "an entry of the extension registry",
    0x84: "an entry of the extension registry",
    0x97: "a buffer outside the file",
    0x98: "a buffer outside the file",
}
_STOP, _PROTO, _FRAME, _LONG_BINPUT, _PUT = ord("."), 0x80, 0x95, ord("r"), ord("p")


class PickleEndsEarlyError(Exception):
    """The pickle goes on beyond the given bytes."""


def scan_pickle(data: bytes, name: str, start: int = 0) -> int:
    """Walks from ``start`` to the STOP opcode; gives the place behind it.

    Args:
        data: bytes that hold the pickle, possibly with more behind it.
        name: the file, for messages.
        start: where the pickle starts in ``data``.

    Raises:
        PickleEndsEarlyError: no STOP in ``data``.
        CorruptFileError: not a pickle.
        UnsafeFileError: absurd memo indices or numbers of objects; opcodes that reach outside the file.
    """
    at, opcode_bytes = start, 0
    run, counted = _RUN.match, _COUNTED
    while True:
        if at < len(data) and (found := run(data, at)) is not None:
            opcode_bytes += found.end() - at
            at = found.end()
        if at >= len(data):
            raise PickleEndsEarlyError
        width = counted.get(data[at])
        if width is not None:
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
            opcode_bytes += 1 + width
        elif data[at] == _STOP:
            break
        else:
            opcode_bytes -= at
            at = _step(data, at, start, name)
            opcode_bytes += at
    # Bytes of texts that look like the opcodes count too: telling them apart costs more than it gives.
    containers = sum(data.count(opcode, start, at) for opcode in _CONTAINERS)
    if opcode_bytes > MAX_OPCODE_BYTES or containers > MAX_CONTAINERS:
        raise UnsafeFileError(
            "a pickle asks for an absurd number of objects",
            file=name,
            expected=f"at most {MAX_OPCODE_BYTES} bytes of opcodes, {MAX_CONTAINERS} of which make a container",
            found=f"{opcode_bytes} and {containers}",
        )
    return at + 1


def max_tuples(data: bytes) -> int:
    """An upper bound on the tuples that a pickle makes, hence on how deep they nest; texts count too."""
    return sum(map(data.count, (b"t", b"\x85", b"\x86", b"\x87")))


def _step(data: bytes, at: int, start: int, name: str) -> int:
    """Checks one of the rarer opcodes; gives the place of the next one."""
    opcode = data[at]
    if opcode in _REFUSED:
        raise UnsafeFileError(f"a pickle refers to {_REFUSED[opcode]}", file=name, found=f"byte {at}")
    if opcode in _LINES:
        return _skip_lines(data, at, start, name)
    if opcode == _LONG_BINPUT:
        _check_memo_index(int.from_bytes(data[at + 1 : at + 5], "little"), at - start, name)
        return at + 5
    if opcode == _FRAME:
        if len(data) - at < 9:
            raise PickleEndsEarlyError
        if at + 9 + int.from_bytes(data[at + 1 : at + 9], "little") > len(data):
            raise PickleEndsEarlyError
        return at + 9
    if opcode == _PROTO:
        if data[at + 1 : at + 2] > bytes([MAX_PROTOCOL]):
            raise CorruptFileError(
                "a pickle has an unknown protocol", file=name, expected=f"at most {MAX_PROTOCOL}", found=data[at + 1]
            )
        return at + 2
    if len(data) - at < 9:
        # A run ends at an opcode whose argument is cut off, too.
        raise PickleEndsEarlyError
    raise CorruptFileError("the pickle is damaged", file=name, found=f"byte {opcode:#04x} where an opcode should be")


def _skip_lines(data: bytes, at: int, start: int, name: str) -> int:
    opcode, end = data[at], at
    for _ in range(_LINES[opcode]):
        end = data.find(b"\n", end + 1)
        if end < 0:
            raise PickleEndsEarlyError
    if opcode == _PUT:
        text = data[at + 1 : end]
        if not text.isdigit() or len(text) > 10:
            raise CorruptFileError("the pickle is damaged: a memo index isn't a number", file=name)
        _check_memo_index(int(text), at - start, name)
    return end + 1


def _check_memo_index(index: int, bytes_so_far: int, name: str) -> None:
    # Writers number memo entries one by one, and each takes at least one opcode.
    if index > bytes_so_far:
        raise UnsafeFileError(
            "a pickle asks for an absurd memo", file=name, expected=f"at most {bytes_so_far} entries", found=index
        )
