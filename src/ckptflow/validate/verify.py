"""All checks of an output directory, alone or against the checkpoint or model that it should equal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptflow.errors import CheckpointError, CkptflowError, NotACheckpointError, VerificationError
from ckptflow.files.kinds import RECORD_NAME
from ckptflow.output.record import read_record
from ckptflow.output.sidefiles import read_config
from ckptflow.request import ConvertRequest, check_named
from ckptflow.validate import files, scan, sidefile_checks, structure
from ckptflow.validate.forward import check_forward
from ckptflow.validate.headers import StoredTensor, bytes_by_dtype, read_header, weight_files
from ckptflow.validate.report import Check, ValidationReport
from ckptflow.validate.skeleton import Skeleton, describe_model

Progress = Callable[[int], None]
USEFUL_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """How to verify.

    Attributes:
        memory_budget_bytes: bound on the buffers of the comparison, in bytes.
        forward_memory_bytes: memory that the forward pass may take; None for half of what is free.
        timeout_seconds: bound on each helper process (model description, forward pass).
        config_dir: as for the conversion, where the trainer left no config.
        base_model: as for the conversion, where an adapter was merged into it.
        threads: threads that hash and scan; None for as many as help.
    """

    memory_budget_bytes: int = 256 * 10**6
    forward_memory_bytes: int | None = None
    timeout_seconds: float = 600.0
    config_dir: Path | None = None
    base_model: Path | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What an output directory says of itself."""

    path: Path
    headers: Mapping[Path, Mapping[str, StoredTensor]]
    tensors: Mapping[str, StoredTensor]
    record: Mapping[str, Any] | None
    config: Mapping[str, Any]


def verify(
    out: Path,
    *,
    against: Path | None = None,
    forward: bool = False,
    options: VerifyOptions | None = None,
    progress: Progress | None = None,
) -> ValidationReport:
    """Check a model directory; ``raise_if_failed`` of the report turns failures into an error.

    Args:
        out: the directory that ``convert`` made, or any Hugging Face directory.
        against: the checkpoint that it was made of, or a Hugging Face directory that should hold the same model.
        forward: load it with transformers and run a few tokens.
        options: limits.
        progress: told the bytes of output as they are hashed, scanned and compared: two or three times all of
            them; and those of the checkpoint whose checksums are looked at.

    Raises:
        NotACheckpointError: there are no safetensors files in ``out``.
        CheckpointError: the checkpoint ``against`` can't be read.
        UsageError: a directory that the options name is not there.
    """
    started = time.monotonic()
    options, tell = options or VerifyOptions(), progress or (lambda _: None)
    check_named(options.config_dir, options.base_model)
    threads = options.threads or min(len(os.sched_getaffinity(0)), USEFUL_THREADS)
    output, broken = open_output(Path(os.path.abspath(out)))
    checks = list(broken)
    checks += _check_alone(output, options, tell, threads)
    comparison = None
    if against is not None:
        from ckptflow.validate.against import compare_with

        found, comparison = compare_with(output, Path(os.path.abspath(against)), options, tell, threads)
        checks += found
    if forward:
        checks.append(_forward(output, options))
    return ValidationReport(
        checks=tuple(checks),
        tensors_compared=comparison.tensors if comparison else 0,
        elements_compared=comparison.elements if comparison else 0,
        differing_elements=comparison.differing if comparison else 0,
        rounding_histogram=comparison.histogram() if comparison else None,
        bytes_by_dtype=bytes_by_dtype(output.tensors),
        seconds=time.monotonic() - started,
    )


def open_output(out: Path) -> tuple[Output, list[Check]]:
    """The directory's headers, config and record; and a failed check where one of them doesn't parse.

    Raises:
        NotACheckpointError: there are no safetensors files.
    """
    if not out.is_dir() or not weight_files(out):
        raise NotACheckpointError(
            "no model directory here",
            file=out,
            expected="a directory with *.safetensors files",
            fix="name the directory that `ckptflow convert` made",
        )
    headers: dict[Path, dict[str, StoredTensor]] = {}
    problems = []
    for path in weight_files(out):
        try:
            headers[path] = read_header(path)
        except CheckpointError as error:
            problems.append(str(error).replace("\n", ";"))
    try:
        config = read_config(out)
    except CheckpointError as error:
        config = {}
        problems.append(str(error).replace("\n", ";"))
    record = read_record(out)
    if record is None and os.path.lexists(out / RECORD_NAME):
        problems.append(f"{RECORD_NAME} is no record of ckptflow")
    tensors = {fqn: tensor for found in headers.values() for fqn, tensor in found.items()}
    output = Output(path=out, headers=headers, tensors=tensors, record=record, config=config)
    if not problems:
        return output, []
    return output, [Check(name="readable files", status="failed", detail="; ".join(problems))]


def _check_alone(output: Output, options: VerifyOptions, progress: Progress, threads: int) -> list[Check]:
    with ThreadPoolExecutor(1) as helper:  # transformers takes seconds to start; the files are read meanwhile
        described = helper.submit(describe, output, options)
        checksums = files.check_checksums(output.path, output.record, progress, threads)
        scanned = scan.scan_tensors(output.tensors, progress, threads)
        skeleton = described.result()
    ties = structure.check_ties(output.tensors, skeleton, output.config)
    return all_checks(output, skeleton, checksums, scanned, ties, scan.check_zeros(output.tensors, scanned))


def all_checks(
    output: Output, skeleton: Skeleton, checksums: Check, scanned: Mapping[str, scan.Scanned], ties: Check, zeros: Check
) -> list[Check]:
    """The checks that need no source, in their order; those that read the weight files were made by the caller."""
    out, tensors, record, config = output.path, output.tensors, output.record, output.config
    allowed = bool(record is not None and record.get("recipe", {}).get("allow_nonfinite"))
    return [
        files.check_index(out, output.headers),
        checksums,
        files.check_record(tensors, record),
        scan.check_tensor_checksums(scanned, record),
        structure.check_keys(tensors, skeleton),
        ties,
        structure.check_dtypes(tensors, config, record, skeleton.float32),
        sidefile_checks.check_tokenizer(out, tensors),
        sidefile_checks.check_generation_config(out, config),
        scan.check_finite(scanned, allowed),
        zeros,
    ]


def describe(output: Output, options: VerifyOptions) -> Skeleton:
    """The model of config.json, and how transformers would load the output's tensors into it."""
    if not (output.path / "config.json").is_file():
        adapter = (output.path / "adapter_config.json").is_file()
        return Skeleton(unavailable="an adapter has no config.json" if adapter else "no config.json")
    headers = {fqn: (tensor.dtype.name, tensor.shape) for fqn, tensor in output.tensors.items()}
    try:
        return describe_model(output.path, headers, options.timeout_seconds)
    except VerificationError as error:
        return Skeleton(architecture="unknown", loading=_refused(error))


def _refused(error: CkptflowError) -> Any:
    from ckptflow.validate.skeleton import Loading

    return Loading(errors=(str(error).replace("\n", ";"),))


def _forward(output: Output, options: VerifyOptions) -> Check:
    if not (output.path / "config.json").is_file():
        return Check(name="forward pass", status="skipped", detail="no config.json")
    weight_bytes = sum(tensor.nbytes for tensor in output.tensors.values())
    return check_forward(output.path, weight_bytes, options.forward_memory_bytes, options.timeout_seconds)


def request_from(output: Output, against: Path, options: VerifyOptions) -> ConvertRequest:
    """The conversion that made ``output``, from its record, with ``against`` as the checkpoint."""
    recipe = {} if output.record is None else output.record.get("recipe", {})
    known = {name: recipe[name] for name in ConvertRequest.__dataclass_fields__ if recipe.get(name) is not None}
    known["keep_dtype"] = tuple(known.get("keep_dtype", ()))
    for name in ("path", "out", "config_dir", "base_model"):
        known.pop(name, None)
    return ConvertRequest(
        path=against, out=output.path, config_dir=options.config_dir, base_model=options.base_model, **known
    )
