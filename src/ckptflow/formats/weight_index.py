"""``model.safetensors.index.json``: which tensor is in which file, held against what the files hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ckptflow.errors import CorruptFileError, InconsistentCheckpointError, UnsafeFileError
from ckptflow.files.jsonfiles import read_json_object
from ckptflow.formats.files import checked_file


def read_weight_map(path: Path, root: Path) -> dict[str, str]:
    """Tensor name → file name.

    Raises:
        CorruptFileError: not an index.
        UnsafeFileError: a name that is more than the name of a file in the same directory.
        IncompleteCheckpointError: missing or empty.
    """
    weight_map = read_json_object(Path(checked_file(path, root).path)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFileError("an index without weight_map", file=path)
    for fqn, name in weight_map.items():
        if not isinstance(name, str) or not name:
            raise CorruptFileError("an index maps a tensor to no file name", file=path, tensor=fqn, found=repr(name))
        if name in (".", "..") or any(c in name for c in "/\\\0"):
            raise UnsafeFileError(
                "an index leads out of its directory",
                file=path,
                tensor=fqn,
                expected="the name of a file in the same directory",
                found=repr(name),
            )
    return weight_map


def check_weight_map(index: Path, weight_map: Mapping[str, str], held: Mapping[str, Iterable[str]]) -> None:
    """Hold the index against the files, both ways.

    Args:
        index: for messages.
        weight_map: tensor name → file name.
        held: file name → names of the tensors in it.

    Raises:
        InconsistentCheckpointError: the index names a tensor that its file doesn't hold, or leaves one out.
    """
    found = {fqn: name for name, fqns in held.items() for fqn in fqns}
    for fqn, name in weight_map.items():
        if found.get(fqn) != name:
            raise _mismatch(index, fqn, f"in {name}", f"in {found[fqn]}" if fqn in found else "in none of the files")
    for fqn, name in found.items():
        if fqn not in weight_map:
            raise _mismatch(index, fqn, "named by the index", f"in {name}, and not named")


def _mismatch(index: Path, fqn: str, expected: str, found: str) -> InconsistentCheckpointError:
    return InconsistentCheckpointError(
        "index and weight files disagree",
        file=index,
        tensor=fqn,
        expected=expected,
        found=found,
        fix="index or files are left over from another save; save the model again",
    )
