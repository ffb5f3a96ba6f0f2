"""Whether the files of the output are all there, all known, and the bytes that were written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ckptflow.errors import CheckpointError
from ckptflow.files.jsonfiles import read_json_object
from ckptflow.files.kinds import RECORD_NAME
from ckptflow.files.sha256 import HashProgress, sha256_file
from ckptflow.output.record import INDEX_SUFFIX
from ckptflow.validate.headers import StoredTensor
from ckptflow.validate.report import Check, listing

SINGLE_NAMES = ("model.safetensors", "adapter_model.safetensors")
"""What transformers and PEFT look for where there is no index."""

FOREIGN_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json", "*.h5", "*.msgpack")

Record = Mapping[str, Any]


def check_index(out: Path, headers: Mapping[Path, Mapping[str, StoredTensor]]) -> Check:
    """The index, the files and their headers tell one story; each tensor is in one file, each file has a reader."""
    problems = [f"{name} is no file of this model" for name in _foreign(out)]
    owners: dict[str, str] = {}
    for path, tensors in headers.items():
        for fqn in tensors:
            if fqn in owners:
                problems.append(f"{fqn} is in {owners[fqn]} and in {path.name}")
            owners[fqn] = path.name
    indexes = sorted(out.glob(f"*{INDEX_SUFFIX}"))
    if len(indexes) > 1:
        problems.append(f"{len(indexes)} indexes: {listing(path.name for path in indexes)}")
    if indexes:
        total = sum(tensor.nbytes for tensors in headers.values() for tensor in tensors.values())
        problems += _index_problems(indexes[0], owners, [path.name for path in headers], total)
    elif len(headers) > 1:
        problems.append(f"{len(headers)} weight files and no index")
    elif headers and next(iter(headers)).name not in SINGLE_NAMES:
        problems.append(f"{next(iter(headers)).name} has a name that no loader looks for")
    figures = {"weight files": len(headers), "tensors": len(owners)}
    if problems:
        return Check(name="weight files and index", status="failed", detail="; ".join(problems[:8]), figures=figures)
    return Check(name="weight files and index", status="passed", detail="each tensor is in one file", figures=figures)


def _foreign(out: Path) -> list[str]:
    return sorted({path.name for pattern in FOREIGN_WEIGHTS for path in out.glob(pattern)})


def _index_problems(index: Path, owners: Mapping[str, str], names: Sequence[str], total_bytes: int) -> list[str]:
    try:
        content = read_json_object(index)
        weight_map, said = content["weight_map"], content.get("metadata", {}).get("total_size")
        listed = dict(weight_map)
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError) as error:
        return [f"{index.name} does not parse: {error}"]
    problems = []
    for file in sorted(set(map(str, listed.values())) - set(names)):
        problems.append(f"{index.name} names {file}, which is not there")
    for file in sorted(set(names) - set(map(str, listed.values()))):
        problems.append(f"{file} is not named in {index.name}")
    if len(names) == 1 and names[0] in SINGLE_NAMES:
        problems.append(f"{index.name} lies beside {names[0]}; loaders take one or the other")
    absent, unlisted = sorted(set(listed) - set(owners)), sorted(set(owners) - set(listed))
    if absent:
        problems.append(f"the index names tensors that no file holds: {listing(absent)}")
    if unlisted:
        problems.append(f"the index does not name {listing(unlisted)}")
    moved = [fqn for fqn in listed if fqn in owners and listed[fqn] != owners[fqn]]
    if moved:
        problems.append(f"the index names another file for {listing(moved)}")
    if said is not None and said != total_bytes:
        problems.append(f"total_size says {said} bytes, the tensors have {total_bytes}")
    return problems


def check_record(tensors: Mapping[str, StoredTensor], record: Record | None) -> Check:
    """The tensors are those that ckptflow.json lists, with its dtypes and shapes."""
    name = "record of tensors"
    if record is None:
        return Check(name=name, status="skipped", detail=f"no {RECORD_NAME} here")
    listed = record.get("tensors", {})
    problems = []
    if set(listed) - set(tensors):
        problems.append(f"missing: {listing(sorted(set(listed) - set(tensors)))}")
    if set(tensors) - set(listed):
        problems.append(f"not listed: {listing(sorted(set(tensors) - set(listed)))}")
    for fqn in sorted(set(listed) & set(tensors)):
        entry, found = listed[fqn], tensors[fqn]
        said = (entry.get("file"), entry.get("dtype"), tuple(entry.get("shape", ())))
        if said != (found.file.name, found.dtype.name, found.shape):
            problems.append(f"{fqn} is {found.dtype} {list(found.shape)} in {found.file.name}, not {list(said)}")
    if problems:
        return Check(name=name, status="failed", detail="; ".join(problems[:8]), figures={"problems": len(problems)})
    return Check(name=name, status="passed", detail=f"as {RECORD_NAME} says", figures={"tensors": len(tensors)})


def check_checksums(
    out: Path,
    record: Record | None,
    progress: HashProgress,
    threads: int,
    elsewhere: Mapping[str, tuple[int, str]] | None = None,
) -> Check:
    """Size and sha256 of every file against ckptflow.json, and no file that it does not list.

    Args:
        out: the directory.
        record: the content of ckptflow.json.
        progress: told the bytes of each block.
        threads: threads that hash.
        elsewhere: name → bytes and sha256 of files that don't lie in the directory.
    """
    name = "sha256 of files"
    if record is None:
        return Check(name=name, status="skipped", detail=f"no {RECORD_NAME} here")
    listed: Mapping[str, Mapping[str, Any]] = record.get("files", {})
    elsewhere = elsewhere or {}
    problems = []
    present = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file() and not p.name.startswith(".")}
    sizes = {file: (out / file).stat().st_size for file in present}
    sizes |= {file: nbytes for file, (nbytes, _) in elsewhere.items()}
    for extra in sorted(set(sizes) - set(listed) - {RECORD_NAME}):
        problems.append(f"{extra} is not listed")
    whole = []
    for file, entry in listed.items():
        if file not in sizes:
            problems.append(f"{file} is missing")
        elif sizes[file] != entry["bytes"]:
            problems.append(f"{file} has {sizes[file]} bytes, not {entry['bytes']}")
        else:
            whole.append(file)
    with ThreadPoolExecutor(threads) as pool:

        def sha256(file: str) -> str:
            return elsewhere[file][1] if file in elsewhere else sha256_file(out / file, progress)

        for file, found in zip(whole, pool.map(sha256, whole), strict=True):
            if found != listed[file]["sha256"]:
                problems.append(
                    f"{file} is not what was written: sha256 {found[:16]}…, not {listed[file]['sha256'][:16]}…"
                )
    figures = {"files": len(listed), "bytes": sum(entry["bytes"] for entry in listed.values())}
    if problems:
        return Check(name=name, status="failed", detail="; ".join(problems[:8]), figures=figures)
    return Check(name=name, status="passed", detail=f"as {RECORD_NAME} says", figures=figures)
