"""The finished model directory as its record, ``ckptflow.json``, describes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ckptflow.errors import OutputError, VerificationError
from ckptflow.files.kinds import RECORD_NAME, kind_of_file

#: The record; at a destination it is put last, so that its presence says that all else is there.
MARKER_NAME = RECORD_NAME

_MARKER_LIMIT_BYTES = 256 << 20
_CONVERT_AGAIN = "convert the checkpoint again into an empty directory"
_LOADED_SUFFIXES = (".safetensors", ".bin", ".gguf")
_WEIGHT_SUFFIXES = (*_LOADED_SUFFIXES, ".pt", ".pth")
_OF_TRAINING = re.compile(r"_rank_\d+[._]|^trainer_state\.json$|^\.metadata$")
_HEX_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFile:
    """One file to publish: its name in the record, where it lies, its size in bytes and its sha256 (hex)."""

    name: str
    path: Path
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """What publishing needs of a ``ckptflow.json``: the fingerprint, and size and sha256 of each file by name.

    ``source`` names the checkpoint for people; a copy of it elsewhere makes the same model.
    """

    fingerprint: str
    files: Mapping[str, tuple[int, str]]
    source: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model directory that is ready to publish; ``files`` are in the order of sending, without the marker."""

    directory: Path
    marker: Marker
    marker_content: bytes
    files: tuple[LocalFile, ...]

    @property
    def global_step(self) -> int | None:
        """Optimizer steps done, where the record says so."""
        source = json.loads(self.marker_content).get("source")
        step = source.get("global_step") if isinstance(source, dict) else None
        return step if isinstance(step, int) else None

    @property
    def total_bytes(self) -> int:
        """Bytes that an upload of all files moves, the marker among them."""
        return sum(file.bytes for file in self.files) + len(self.marker_content)


def is_weight_name(name: str) -> bool:
    """Whether a file name is that of a weight file."""
    return name.endswith(_WEIGHT_SUFFIXES)


def is_loaded_name(name: str) -> bool:
    """Whether a loader of models takes a weight file of that name in place of, or beside, one of ours."""
    return name.endswith(_LOADED_SUFFIXES)


def is_index_name(name: str) -> bool:
    """Whether a file name is that of an index of weight files (``model.safetensors.index.json``)."""
    return name.endswith(".index.json")


def is_training_name(name: str) -> bool:
    """Whether only a training writes a file of that name: what a model takes the place of is a model."""
    return "/" not in name and (_OF_TRAINING.search(name) is not None or "optimizer" in kind_of_file(name))


def publish_rank(name: str) -> int:
    """0 for weight files, 1 for everything else, 2 for indexes."""
    return 0 if is_weight_name(name) else 2 if is_index_name(name) else 1


def publish_order(names: Iterable[str]) -> tuple[str, ...]:
    """By rank, then name: a reader that finds an index finds all that it names."""
    return tuple(sorted(names, key=lambda name: (publish_rank(name), name)))


def parse_marker(content: bytes) -> Marker:
    """Read a ``ckptflow.json``.

    Raises:
        ValueError: it is not a record of format 1, or names files outside its directory.
    """
    document = json.loads(content)
    if not isinstance(document, dict) or document.get("format") != 1:
        raise ValueError("not a record of format 1")
    fingerprint, files = document.get("fingerprint"), document.get("files")
    if not isinstance(fingerprint, str) or not fingerprint or not isinstance(files, dict) or not files:
        raise ValueError("no fingerprint or no files")
    table: dict[str, tuple[int, str]] = {}
    for name, facts in files.items():
        _check_name(name)
        size, sha256 = (facts.get("bytes"), facts.get("sha256")) if isinstance(facts, dict) else (None, None)
        if type(size) is not int or size < 0 or not isinstance(sha256, str) or not _HEX_SHA256.fullmatch(sha256):
            raise ValueError(f"no size or sha256 of {name!r}")
        table[name] = (size, sha256)
    source = document.get("source")
    name = source.get("name") if isinstance(source, dict) else None
    return Marker(fingerprint=fingerprint, files=table, source=name if isinstance(name, str) else None)


def marker_in(content: bytes | None) -> Marker | None:
    """What is read from under the marker's name: None where there is nothing, or something else."""
    try:
        return None if content is None else parse_marker(content)
    except (ValueError, RecursionError):
        return None


def _check_name(name: str) -> None:
    parts = name.split("/")
    is_plain = bool(name) and not any(part in ("", ".", "..") for part in parts) and "\\" not in name
    if not is_plain or "\0" in name or name == MARKER_NAME or any(part.startswith(".ckptflow-") for part in parts):
        raise ValueError(f"{name!r} is no name for a file of a model")


def read_local_model(out_dir: Path) -> LocalModel:
    """Read the record of a model directory and check it against the directory: names, sizes, index.

    Contents are not read here; sha256 is checked while files are sent.

    Raises:
        OutputError: no record, or it does not parse.
        VerificationError: a file is missing, has another size, or an index names files that the record lacks.
    """
    marker_path = out_dir / MARKER_NAME
    try:
        if marker_path.stat().st_size > _MARKER_LIMIT_BYTES:
            raise OutputError(
                "the record is absurdly large",
                file=marker_path,
                expected=f"at most {_MARKER_LIMIT_BYTES} bytes",
                fix=_CONVERT_AGAIN,
            )
        content = marker_path.read_bytes()
        marker = parse_marker(content)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise OutputError(
            "not a finished model directory",
            file=marker_path,
            expected="the record that `ckptflow convert` writes last",
            found="no such file",
            fix="run `ckptflow convert` into this directory first",
        ) from error
    except (ValueError, RecursionError) as error:
        raise OutputError("the record does not parse", file=marker_path, found=error, fix=_CONVERT_AGAIN) from error
    files = tuple(_local_file(out_dir, name, *marker.files[name]) for name in publish_order(marker.files))
    for file in files:
        if is_index_name(file.name):
            _check_index(file, marker.files)
    return LocalModel(directory=out_dir, marker=marker, marker_content=content, files=files)


def _local_file(out_dir: Path, name: str, size: int, sha256: str) -> LocalFile:
    path = out_dir / name
    if not path.resolve().is_relative_to(out_dir.resolve()) or (path.exists() and not path.is_file()):
        raise VerificationError(
            "a file of the model is not a plain file inside its directory", file=path, fix=_CONVERT_AGAIN
        )
    found: int | str = path.stat().st_size if path.is_file() else "no such file"
    if found != size:
        raise VerificationError(
            "a file is not what the record says",
            file=path,
            expected=f"{size} bytes",
            found=f"{found} bytes" if isinstance(found, int) else found,
            fix="convert the checkpoint again: the directory was changed after it was written",
        )
    return LocalFile(name=name, path=path, bytes=size, sha256=sha256)


def _check_index(file: LocalFile, names: Iterable[str]) -> None:
    try:
        weight_map = json.loads(file.path.read_bytes())["weight_map"]
        wanted = {str(PurePosixPath(file.name).parent / weight_file) for weight_file in set(weight_map.values())}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise VerificationError(
            "the index does not parse", file=file.path, found=repr(error), fix=_CONVERT_AGAIN
        ) from error
    missing = sorted(wanted - set(names))
    if missing:
        raise VerificationError(
            "the index names weight files that the record lacks",
            file=file.path,
            found=", ".join(missing[:5]),
            fix=_CONVERT_AGAIN,
        )
