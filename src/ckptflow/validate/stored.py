"""All checks of a model whose weight files lie in a store: those of ``verify``, over ranges read from there."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ckptflow.errors import CheckpointError
from ckptflow.output.record import read_record
from ckptflow.output.sidefiles import read_config
from ckptflow.validate import files, scan, structure
from ckptflow.validate.against import compare_with
from ckptflow.validate.forward import NAME, check_forward, memory_check
from ckptflow.validate.headers import StoredTensor, bytes_by_dtype, parse_header
from ckptflow.validate.report import Check, ValidationReport
from ckptflow.validate.skeleton import Skeleton
from ckptflow.validate.storedbytes import FileFacts, Ranges, StoredFile, StoredReader
from ckptflow.validate.verify import USEFUL_THREADS, Output, VerifyOptions, all_checks, describe

Progress = Callable[[int], None]

_USUAL_RANGE_BYTES = 16 << 20
_LEAST_RANGE_BYTES = 1 << 20
_MOST_AT_ONCE = 8
_SPARE_DISK = 1.1
"""Disk space that fetching a model takes, over its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOptions:
    """Whether a model in a store may be fetched, to be loaded and run.

    Attributes:
        fetch_limit_bytes: largest model that is fetched, into a temporary directory beside ``frame``.
    """

    fetch_limit_bytes: int = 2 * 10**9


def verify_stored(
    frame: Path,
    weight_files: Sequence[StoredFile],
    *,
    against: Path,
    forward: ForwardOptions | None = None,
    options: VerifyOptions | None = None,
    progress: Progress | None = None,
) -> ValidationReport:
    """Check a model against the checkpoint that it was made of; its weight files lie in a store.

    Each weight file is read once, in order; half of the memory budget holds ranges on their way, half the comparison.

    Args:
        frame: directory with all but the weight files: record, config, index, tokenizer.
        weight_files: the weight files.
        against: the checkpoint.
        forward: fetch the model, load it with transformers and run a few tokens; None leaves it out.
        options: limits.
        progress: told the bytes of output as they are compared, and those of the checkpoint whose checksums are looked
            at.

    Raises:
        CheckpointError: the checkpoint can't be read.
        CkptflowError: what reading from the store raises.
    """
    started = time.monotonic()
    options, tell = options or VerifyOptions(), progress or (lambda _: None)
    threads = options.threads or min(len(os.sched_getaffinity(0)), USEFUL_THREADS)
    output, checks = _open_output(frame, weight_files)
    budget = options.memory_budget_bytes // 2
    range_bytes = max(_LEAST_RANGE_BYTES, min(_USUAL_RANGE_BYTES, budget // 4))
    at_once = max(1, min(_MOST_AT_ONCE, budget // range_bytes - 2))
    with ThreadPoolExecutor(at_once, "ckptflow-reread") as pool, ThreadPoolExecutor(1) as helper:
        described = helper.submit(describe, output, options)
        ranges = Ranges(nbytes=range_bytes, at_once=at_once, pool=pool)
        reader = StoredReader(weight_files, output.tensors, ranges)
        halved = replace(options, memory_budget_bytes=budget)
        compared, comparison = compare_with(output, against, halved, tell, threads, reader)
        facts = reader.facts()
        checks += _check_alone(output, weight_files, facts, described.result(), threads)
        checks += compared
        if forward is not None:
            checks.append(_forward(output, weight_files, ranges, forward, options))
    return ValidationReport(
        checks=tuple(checks),
        tensors_compared=comparison.tensors,
        elements_compared=comparison.elements,
        differing_elements=comparison.differing,
        rounding_histogram=comparison.histogram(),
        bytes_by_dtype=bytes_by_dtype(output.tensors),
        seconds=time.monotonic() - started,
    )


def _open_output(frame: Path, weight_files: Sequence[StoredFile]) -> tuple[Output, list[Check]]:
    headers: dict[Path, dict[str, StoredTensor]] = {}
    problems = []
    for file in sorted(weight_files, key=lambda file: file.name):
        try:
            headers[frame / file.name] = parse_header(frame / file.name, file.nbytes, file.read)
        except CheckpointError as error:
            problems.append(str(error).replace("\n", ";"))
    tensors = {fqn: tensor for found in headers.values() for fqn, tensor in found.items()}
    output = Output(path=frame, headers=headers, tensors=tensors, record=read_record(frame), config=read_config(frame))
    if not problems:
        return output, []
    return output, [Check(name="readable files", status="failed", detail="; ".join(problems))]


def _check_alone(
    output: Output,
    weight_files: Sequence[StoredFile],
    facts: dict[str, FileFacts],
    skeleton: Skeleton,
    threads: int,
) -> list[Check]:
    scanned = {fqn: found for each in facts.values() for fqn, found in each.scanned.items()}
    elsewhere = {file.name: (file.nbytes, facts[file.name].sha256) for file in weight_files}
    checksums = files.check_checksums(output.path, output.record, lambda _: None, threads, elsewhere)
    ties = structure.check_ties(
        output.tensors, skeleton, output.config, {fqn: found.checksum for fqn, found in scanned.items()}
    )
    tails = {output.path / name: each.zero_tail_bytes for name, each in facts.items()}
    zeros = scan.check_zeros(output.tensors, scanned, tails)
    return all_checks(output, skeleton, checksums, scanned, ties, zeros)


def _forward(
    output: Output,
    weight_files: Sequence[StoredFile],
    ranges: Ranges,
    forward: ForwardOptions,
    options: VerifyOptions,
) -> Check:
    """The forward pass of a model that fits memory, disk and limit; else why there is none."""
    if not (output.path / "config.json").is_file():
        return Check(name=NAME, status="skipped", detail="no config.json")
    weight_bytes = sum(tensor.nbytes for tensor in output.tensors.values())
    total = sum(file.nbytes for file in weight_files)
    if total > forward.fetch_limit_bytes:
        limit = forward.fetch_limit_bytes / 1e9
        detail = f"there is no local copy, and {total / 1e9:.1f} GB are over the {limit:.1f} GB that may be fetched"
        return Check(name=NAME, status="skipped", detail=detail, figures={"bytes": total})
    fits = memory_check(weight_bytes, options.forward_memory_bytes)
    if fits.status == "skipped":
        return fits
    free = shutil.disk_usage(output.path).free
    if total * _SPARE_DISK > free:
        detail = f"there is no local copy, and {free / 1e9:.1f} GB of disk are too few for one of {total / 1e9:.1f} GB"
        return Check(name=NAME, status="skipped", detail=detail, figures={"bytes": total})
    with tempfile.TemporaryDirectory(prefix="fetched-", dir=output.path.parent) as directory:
        shutil.copytree(output.path, directory, dirs_exist_ok=True)
        for file in weight_files:
            with open(Path(directory) / file.name, "wb") as out:
                out.writelines(ranges.all_of(file))
        return check_forward(Path(directory), weight_bytes, options.forward_memory_bytes, options.timeout_seconds)
