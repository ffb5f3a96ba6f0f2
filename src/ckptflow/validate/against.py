"""An output directory against its checkpoint, or against a Hugging Face directory that should hold the same model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckptflow.formats.registry import locate
from ckptflow.tensors import Shape
from ckptflow.validate.report import Check, listing
from ckptflow.validate.reread.choose import SourceReader
from ckptflow.validate.reread.huggingface import HuggingFaceRereader
from ckptflow.validate.source_checksums import check_source_checksums
from ckptflow.validate.values import (
    BoxReader,
    Comparison,
    Limits,
    OutputReader,
    Wanted,
    compare_plan,
    compare_tensors,
    values_check,
)

if TYPE_CHECKING:
    from ckptflow.conversion import Conversion
    from ckptflow.validate.verify import Output, VerifyOptions

Progress = Callable[[int], None]


def compare_with(
    output: Output,
    against: Path,
    options: VerifyOptions,
    progress: Progress,
    threads: int,
    reader: BoxReader | None = None,
) -> tuple[list[Check], Comparison]:
    """Compare every element with a checkpoint under the recorded recipe, or with a reference model.

    The checkpoint itself is held against the checksums that torch recorded in it. ``reader`` gives the output's
    tensors, in the order in which they lie in the files, where these are not in a directory.

    Raises:
        CheckpointError: ``against`` can't be read.
    """
    conversion = _plan(output, against, options)
    limits = Limits(threads=threads, memory_budget_bytes=options.memory_budget_bytes)
    recorded = None if output.record is None else output.record.get("fingerprint")
    if conversion.manifest.layout == "huggingface" and conversion.fingerprint != recorded:
        check, comparison = _with_reference(output, conversion, limits, progress, reader)
        return [check], comparison
    check, comparison = _with_source(output, conversion, limits, progress, reader)
    return [check_source_checksums(conversion.manifest, conversion.plan, progress, threads), check], comparison


def _plan(output: Output, against: Path, options: VerifyOptions) -> Conversion:
    from ckptflow.conversion import plan_conversion
    from ckptflow.validate.verify import request_from

    locate(against)  # an ambiguous or empty path is told before a config is looked for
    conversion = plan_conversion(request_from(output, against, options))
    if conversion.manifest.config_dir is None and options.config_dir is None and output.config:
        # The trainer left no config: the conversion was given one, and the output has a copy.
        return plan_conversion(replace(conversion.request, config_dir=output.path))
    return conversion


def _with_source(
    output: Output, conversion: Conversion, limits: Limits, progress: Progress, reader: BoxReader | None
) -> tuple[Check, Comparison]:
    planned = {tensor.fqn: tensor for tensor in conversion.plan.tensors}
    wanted = {fqn: (tensor.dtype.name, tensor.shape) for fqn, tensor in planned.items()}
    common, problems = _common(output, wanted)
    source = SourceReader(conversion.manifest)
    reader = reader or OutputReader(list(output.headers))
    comparison = compare_plan([planned[fqn] for fqn in common], reader, source, limits, progress)
    how = f"{source.how} ({source.note})" if source.note else source.how
    return values_check(comparison, how, problems), comparison


def _with_reference(
    output: Output, conversion: Conversion, limits: Limits, progress: Progress, reader: BoxReader | None
) -> tuple[Check, Comparison]:
    reference = HuggingFaceRereader([Path(file.path) for file in conversion.manifest.files])
    ties = {**conversion.manifest.ties, **conversion.plan.ties}
    wanted: dict[str, tuple[str | None, Shape]] = {}
    for fqn in reference.names:
        shape = reference.shape(fqn)
        if shape is not None and (fqn in output.tensors or fqn not in ties):
            wanted[fqn] = (None, shape)
    common, problems = _common(output, wanted)
    reader = reader or OutputReader(list(output.headers))
    comparison = Comparison()
    all_wanted = [Wanted(fqn, output.tensors[fqn].shape, partial(reference.read, fqn)) for fqn in common]
    compare_tensors(comparison, all_wanted, reader, limits, progress)
    return values_check(comparison, f"{reference.how}, as a reference model", problems), comparison


def _common(
    output: Output, wanted: dict[str, tuple[str, Shape]] | dict[str, tuple[str | None, Shape]]
) -> tuple[list[str], list[str]]:
    """Names that can be compared, and what is wrong with the others."""
    problems, common = [], []
    missing = sorted(set(wanted) - set(output.tensors))
    extra = sorted(set(output.tensors) - set(wanted))
    if missing:
        problems.append(f"not in the output: {listing(missing)}")
    if extra:
        problems.append(f"not in the source: {listing(extra)}")
    for fqn, (dtype, shape) in wanted.items():
        found = output.tensors.get(fqn)
        if found is None:
            continue
        if found.shape != shape or dtype not in (None, found.dtype.name):
            problems.append(f"{fqn} is {found.dtype} {list(found.shape)}, not {dtype or ''} {list(shape)}")
        else:
            common.append(fqn)
    common.sort(key=lambda fqn: (output.tensors[fqn].file, output.tensors[fqn].begin))
    return common, problems
