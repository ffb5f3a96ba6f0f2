"""Ways to damage a small checkpoint: bytes, lengths, files, pickles, zip directories, JSON.

A mutation is plain data, so that a failing one can be printed, shrunk and tried again. ``apply`` says what it touched.
"""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUMBERS = (0, 1, 2, 7, 0x7F, 0x80, 0xFF, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
# Opcodes that matter: marks, memo, builders, globals, calls, frames, persistent ids, deep nesting.
SNIPPETS = (
    b"(", b")", b"]", b"}", b"0", b"1", b"2", b"t", b"\x85", b"\x86", b"\x87", b"R", b"b", b"a", b"e", b"s", b"u", b"Q",
    b"\x81", b"\x92", b"\x93", b"\x94", b"q\x00", b"r\xff\xff\xff\x7f", b"h\x00", b"j\xff\xff\xff\x7f", b".", b"N",
    b"K\xff", b"M\xff\xff", b"J\xff\xff\xff\xff", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\x7f",
    b"X\xff\xff\xff\x7f", b"B\xff\xff\xff\x7f", b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n)R",
    b"X\x01\x00\x00\x00a", b"]" * 300 + b"a" * 299, b"(" * 200, b"2t" * 400,
    b"\x80\x05", b"\x80\xff", b"G\x7f\xf0\x00\x00\x00\x00\x00\x00",
)  # fmt: skip
JSON_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, 1.5, float("inf"), "", "x", "../../x", "/etc/passwd", "a\0b",
    [], {}, [0, 0], [2**40, 2**40], [-1, 4], [[[[]]]], {"a": {"b": 1}}, "x" * 5000, "F32", "BF16",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change. What the numbers mean depends on ``kind``; any numbers are valid."""

    kind: str
    file: int
    at: float
    value: int
    length: int


@dataclass(frozen=True, slots=True)
class Touched:
    """What was changed: bytes ``[begin, end)`` of one file in place; ``in_place`` is False for anything else."""

    kind: str
    name: str
    begin: int
    end: int
    in_place: bool


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


def apply(mutation: Mutation, root: Path) -> Touched | None:
    """Change the checkpoint at ``root``; None where the mutation does not apply to the file that it chose."""
    files = files_of(root)
    if not files:
        return None
    path = files[mutation.file % len(files)]
    return KINDS[mutation.kind](mutation, path, files)


def _place(mutation: Mutation, size: int) -> int:
    """A place in a file; half of them near its ends, where headers and directories are."""
    near = min(size, 4096)
    if mutation.at < 0.25:
        return int(mutation.at * 4 * near) % max(size, 1)
    if mutation.at < 0.5:
        return max(size - 1 - int((mutation.at - 0.25) * 4 * near), 0)
    return min(int((mutation.at - 0.5) * 2 * size), max(size - 1, 0))


def _overwrite(mutation: Mutation, path: Path, at: int, data: bytes) -> Touched | None:
    whole = bytearray(path.read_bytes())
    data = data[: max(len(whole) - at, 0)]
    if not data or bytes(whole[at : at + len(data)]) == data:
        return None
    whole[at : at + len(data)] = data
    path.write_bytes(whole)
    return Touched(mutation.kind, str(path), at, at + len(data), True)


def flip(mutation: Mutation, path: Path, files: list[Path]) -> Touched | None:
    size = path.stat().st_size
    if not size:
        return None
    at = _place(mutation, size)
    return _overwrite(mutation, path, at, bytes([path.read_bytes()[at] ^ (1 << mutation.value % 8)]))


def number(mutation: Mutation, path: Path, files: list[Path]) -> Touched | None:
    width = (1, 2, 4, 8)[mutation.length % 4]
    value = NUMBERS[mutation.value % len(NUMBERS)] % 2 ** (8 * width)
    return _overwrite(mutation, path, _place(mutation, path.stat().st_size), value.to_bytes(width, "little"))


def zeros(mutation: Mutation, path: Path, files: list[Path]) -> Touched | None:
    return _overwrite(mutation, path, _place(mutation, path.stat().st_size), bytes(1 + mutation.length * 16))


def truncate(mutation: Mutation, path: Path, files: list[Path]) -> Touched | None:
    size = path.stat().st_size
    if not size:
        return None
    with open(path, "r+b") as file:
        file.truncate(_place(mutation, size))
    return Touched(mutation.kind, str(path), 0, size, False)


def extend(mutation: Mutation, path: Path, files: list[Path]) -> Touched | None:
    size = path.stat().st_size
    with open(path, "ab") as file:
        file.write(bytes([mutation.value % 256]) * (1 + mutation.length * 8))
    return Touched(mutation.kind, str(path), size, size, False)


def splice(mutation: Mutation, path: Path, files: list[Path]) -> Touched | None:
    """Bytes of another file of the checkpoint over this one's."""
    other = files[mutation.value % len(files)].read_bytes()
    begin = int(mutation.at * len(other))
    return _overwrite(
        mutation, path, _place(mutation, path.stat().st_size), other[begin : begin + 1 + mutation.length * 32]
    )


def cut_out(mutation: Mutation, path: Path, files: list[Path]) -> Touched | None:
    data = path.read_bytes()
    at = _place(mutation, len(data))
    path.write_bytes(data[:at] + data[at + 1 + mutation.length :])
    return Touched(mutation.kind, str(path), at, len(data), False)


def swap(mutation: Mutation, path: Path, files: list[Path]) -> Touched | None:
    """Two files change their names; of the same suffix where there are such."""
    alike = [f for f in files if f.suffix == path.suffix and f != path] or [f for f in files if f != path]
    if not alike:
        return None
    other = alike[mutation.value % len(alike)]
    if other.read_bytes() == path.read_bytes():
        return None
    spare = path.with_name("spare")
    path.rename(spare)
    other.rename(path)
    spare.rename(other)
    return Touched(mutation.kind, str(path), 0, path.stat().st_size, False)


def duplicate(mutation: Mutation, path: Path, files: list[Path]) -> Touched | None:
    """One file's content under another one's name too."""
    alike = [f for f in files if f.suffix == path.suffix and f != path]
    if not alike:
        return None
    other = alike[mutation.value % len(alike)]
    if other.read_bytes() == path.read_bytes():
        return None
    shutil.copyfile(path, other)
    return Touched(mutation.kind, str(other), 0, other.stat().st_size, False)


def delete(mutation: Mutation, path: Path, files: list[Path]) -> Touched | None:
    size = path.stat().st_size
    path.unlink()
    return Touched(mutation.kind, str(path), 0, size, False)


def rename(mutation: Mutation, path: Path, files: list[Path]) -> Touched | None:
    """Another number in the name."""
    digits = [i for i, c in enumerate(path.name) if c.isdigit()]
    at = digits[mutation.length % len(digits)] if digits else len(path.name)
    target = path.with_name(path.name[:at] + str(mutation.value % 10) + path.name[at + 1 :])
    if target.exists():
        return None
    path.rename(target)
    return Touched(mutation.kind, str(path), 0, target.stat().st_size, False)


def pickle_edit(mutation: Mutation, path: Path, files: list[Path]) -> Touched | None:
    """The pickle in a torch file (its checksum made good again), or a bare one, with opcodes put in or taken out."""
    data = path.read_bytes()
    if data[:2] == b"PK":
        return _edit_zip(mutation, path, lambda pickled: _edited(mutation, pickled))
    if data[:1] != b"\x80":
        return None
    path.write_bytes(_edited(mutation, data))
    return Touched(mutation.kind, str(path), 0, len(data), False)


def _edited(mutation: Mutation, data: bytes) -> bytes:
    at = int(mutation.at * len(data))
    snippet = SNIPPETS[mutation.value % len(SNIPPETS)]
    cut = (0, 0, 1, len(snippet), mutation.length)[mutation.length % 5]
    return data[:at] + snippet + data[at + cut :]


def pickle_number(mutation: Mutation, path: Path, files: list[Path]) -> Touched | None:
    """Another value for one of the numbers in a pickle: sizes, offsets, strides, ranks."""
    data = path.read_bytes()
    if data[:2] == b"PK":
        return _edit_zip(mutation, path, lambda pickled: _renumbered(mutation, pickled))
    if data[:1] != b"\x80":
        return None
    path.write_bytes(_renumbered(mutation, data))
    return Touched(mutation.kind, str(path), 0, len(data), False)


def _renumbered(mutation: Mutation, data: bytes) -> bytes:
    places = [i for i, c in enumerate(data[:-5]) if c in b"KMJ"]
    if not places:
        return data
    at = places[int(mutation.at * len(places))]
    width = {ord("K"): 1, ord("M"): 2, ord("J"): 4}[data[at]]
    value = NUMBERS[mutation.value % len(NUMBERS)] % 2 ** (8 * width)
    return data[: at + 1] + value.to_bytes(width, "little") + data[at + 1 + width :]


def _edit_zip(mutation: Mutation, path: Path, edit: Callable[[bytes], bytes]) -> Touched | None:
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, EOFError):
        return None  # an earlier mutation broke it
    name = next((n for n in records if n.endswith("/data.pkl")), None)
    if name is None:
        return None
    records[name] = edit(records[name])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for record, content in records.items():
            archive.writestr(record, content)
    return Touched(mutation.kind, str(path), 0, size, False)


def zip_directory(mutation: Mutation, path: Path, files: list[Path]) -> Touched | None:
    """A number in the directory of a zip, or in a local header."""
    data = path.read_bytes()
    if data[:2] != b"PK":
        return None
    starts = [i for i in range(len(data) - 4) if data[i : i + 2] == b"PK" and data[i + 2 : i + 4] in _ZIP_MAGICS]
    at = starts[int(mutation.at * len(starts))] + 4 + mutation.length % 56
    width = (1, 2, 4, 8)[mutation.value % 4]
    value = NUMBERS[mutation.value // 4 % len(NUMBERS)] % 2 ** (8 * width)
    return _overwrite(mutation, path, at, value.to_bytes(width, "little"))


_ZIP_MAGICS = (b"\x01\x02", b"\x03\x04", b"\x05\x06", b"\x06\x06", b"\x06\x07")


def json_edit(mutation: Mutation, path: Path, files: list[Path]) -> Touched | None:
    """A value, a key or an item in a JSON file or in the header of a safetensors file."""
    data = path.read_bytes()
    rest = b""
    if path.suffix == ".safetensors" and len(data) > 8:
        length = struct.unpack("<Q", data[:8])[0]
        data, rest = data[8 : 8 + length], data[8 + length :]
    try:
        content = json.loads(data)
    except ValueError:
        return None
    changed = json.dumps(_edit_json(mutation, content)).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + rest if path.suffix == ".safetensors" else changed)
    return Touched(mutation.kind, str(path), 0, len(data), False)


def _edit_json(mutation: Mutation, content: Any) -> Any:
    places: list[tuple[Any, Any]] = []
    level = [content]
    while level:
        item = level.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        for key in keys:
            places.append((item, key))
            level.append(item[key])
    if not places:
        return JSON_VALUES[mutation.value % len(JSON_VALUES)]
    holder, key = places[int(mutation.at * len(places))]
    if mutation.length % 4 == 0:
        del holder[key]
    elif mutation.length % 4 == 1 and isinstance(holder, dict):
        holder[str(JSON_VALUES[mutation.value % len(JSON_VALUES)])] = holder.pop(key)
    else:
        holder[key] = JSON_VALUES[mutation.value % len(JSON_VALUES)]
    return content


KINDS: dict[str, Callable[[Mutation, Path, list[Path]], Touched | None]] = {
    function.__name__: function
    for function in (
        flip, number, zeros, truncate, extend, splice, cut_out, swap, duplicate, delete, rename,
        pickle_edit, pickle_number, zip_directory, json_edit,
    )
}  # fmt: skip
