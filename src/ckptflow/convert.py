"""From a checkpoint to a model directory: plan, write file by file, finish. Each step can be run by itself.

``convert`` does it all in one process. A flow calls ``plan_conversion`` and then, under ``claim``, ``write_file`` for
each weight file (in any process that sees the same file system) and ``finish``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from ckptflow.conversion import Conversion, plan_conversion
from ckptflow.engine.checksums import compare_the_rest
from ckptflow.engine.compare import check_equal_sources
from ckptflow.engine.execute import Cancel, write_weight_file
from ckptflow.engine.record import WeightFileRecord
from ckptflow.errors import OutputError
from ckptflow.files.jsonfiles import write_durably, write_json
from ckptflow.files.kinds import RECORD_NAME
from ckptflow.files.locks import exclusive, in_use
from ckptflow.files.sha256 import sha256_file
from ckptflow.fingerprint import check_sources_unchanged, relative_name
from ckptflow.output.record import INDEX_SUFFIX, conversion_record, read_record, weight_index
from ckptflow.output.replacing import check_replaceable
from ckptflow.output.sidefiles import generation_notes, loading_notes
from ckptflow.output.workspace import Workspace
from ckptflow.plan import ConsolidationPlan
from ckptflow.request import ConvertRequest

Progress = Callable[[int], None]


class PlannedModel(Protocol):
    """A model directory that is planned down to the bytes, whatever it is made of."""

    @property
    def plan(self) -> ConsolidationPlan:
        """All that is written."""

    @property
    def fingerprint(self) -> str:
        """The same fingerprint gives the same bytes."""

    @property
    def workspace(self) -> Workspace:
        """Where it is made."""

    @property
    def inputs(self) -> Sequence[Path]:
        """Files and directories that it is made of."""

    @property
    def overwrite(self) -> bool:
        """Whether it may replace something else."""


@contextmanager
def claim(planned: PlannedModel) -> Iterator[dict[str, Any] | None]:
    """Hold OUT against other runs; gives the record if OUT already holds this very model, checked.

    Another run on the same OUT is waited for. Inside the block after a failure nothing is left behind; after a kill
    (or Ctrl-C) finished files stay in the hidden workspace for the next run.

    Raises:
        OutputError: OUT holds something else, and ``overwrite`` was not asked or would cost more than a model; or the
            disk is too full.
    """
    workspace = planned.workspace
    created_parents = _missing_parents(workspace.out.parent)
    with exclusive(workspace.lock):
        try:
            record = _existing(planned)
            if record is not None:
                workspace.discard()
                yield record
                return
            workspace.prepare()
            _check_space(planned)
            yield None
        except Exception:
            workspace.discard()
            for parent in created_parents:
                _remove_if_empty(parent)
            raise


def _missing_parents(path: Path) -> list[Path]:
    return [p for p in (path, *path.parents) if not p.exists()]


def _remove_if_empty(path: Path) -> None:
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()


def _existing(planned: PlannedModel) -> dict[str, Any] | None:
    out = planned.workspace.out
    if os.path.ismount(out):
        raise OutputError(
            "OUT is a mount point, which nothing can be renamed to", file=out, fix="name a directory in it"
        )
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return None
    if not out.is_dir():
        raise OutputError("OUT is no directory", file=out, fix="choose another OUT")
    record = read_record(out)
    if record is not None and record.get("fingerprint") == planned.fingerprint:
        damaged = damaged_files(out, record)
        if not damaged:
            return record
        if not planned.overwrite:
            raise OutputError(
                "OUT holds this very model, but files of it were changed since",
                file=out / damaged[0],
                fix="make it again with --overwrite",
            )
    if not planned.overwrite:
        raise OutputError(
            "OUT already holds something else",
            file=out,
            expected="nothing, or the result of the same source and options",
            found="another model" if record else "files that ckptflow did not write",
            fix="choose another OUT, or replace it with --overwrite",
        )
    check_replaceable(out, planned.inputs, record)
    return None


def damaged_files(out: Path, record: Mapping[str, Any]) -> list[str]:
    """Files of a model directory that are missing or whose size or sha256 is not what its record says."""
    damaged = []
    for name, entry in record["files"].items():
        path = out / name
        if not path.is_file() or path.stat().st_size != entry["bytes"] or sha256_file(path) != entry["sha256"]:
            damaged.append(name)
    return damaged


def _check_space(planned: PlannedModel) -> None:
    workspace = planned.workspace
    missing = sum(f.data_bytes for f in planned.plan.files if workspace.finished(f.name) is None)
    free = shutil.disk_usage(workspace.base).free
    if missing > free:
        raise OutputError(
            "the disk is too full for the output",
            file=workspace.out.parent,
            expected=f"{missing} bytes free",
            found=f"{free} bytes free",
            fix="free space, or choose an OUT on another disk",
        )


def write_file(
    conversion: Conversion, number: int, progress: Progress | None = None, cancel: Cancel | None = None
) -> WeightFileRecord:
    """Write weight file ``number`` (from 0) of the plan, unless it is finished already. Call it under ``claim``.

    Raises:
        OutputError: it can't be written, or ``cancel``, which is looked at a few times a second, was set.
        ValueRefusedError: NaN or Inf, in the source or by the cast.
        SourceChangedError: a source file changed while it was read.
        CorruptFileError: a source file is not what the checksums in it say.
    """
    file, workspace = conversion.plan.files[number], conversion.workspace
    record = workspace.finished(file.name)
    if record is not None:
        if progress is not None:
            progress(file.data_bytes)
        return record
    path, options = workspace.model / file.name, conversion.engine_options
    record = write_weight_file(file, path, options, progress, cancel, conversion.recorded)
    workspace.keep(record)
    return record


def check_replicas(conversion: Conversion) -> None:
    """Prove that replicas, ties and 16-bit copies hold the bits that they must.

    Raises:
        InconsistentCheckpointError: two of them differ.
    """
    if conversion.plan.equal:
        check_equal_sources(conversion.plan.equal, conversion.engine_options)


def finish(conversion: Conversion) -> dict[str, Any]:
    """Add side files, index and record to the weight files, and rename the whole to OUT. Call it under ``claim``.

    Returns:
        The content of ``ckptflow.json``.

    Raises:
        OutputError: a weight file has not been written.
        SourceChangedError: the checkpoint changed since it was planned.
        CorruptFileError: a source file is not what the checksums in it say.
    """
    content = write_all_but_weights(conversion, finished_files(conversion))
    conversion.workspace.publish()
    return content


def write_all_but_weights(conversion: Conversion, weights: Sequence[WeightFileRecord]) -> dict[str, Any]:
    """Write side files, index and record into the workspace, wherever the weight files are; gives the record.

    Raises:
        SourceChangedError: the checkpoint changed since it was planned.
        CorruptFileError: a source file is not what the checksums in it say.
    """
    workspace, plan, sources = conversion.workspace, conversion.plan, conversion.manifest.files
    threads = conversion.engine_options.thread_count
    compared = compare_the_rest((w.compared for w in weights), sources, conversion.recorded, plan.tensors, threads)
    check_sources_unchanged(sources)
    files = add_side_files(conversion, weights, conversion.side)
    config_dir = conversion.request.config_dir or conversion.manifest.config_dir
    content = conversion_record(
        fingerprint=conversion.fingerprint,
        manifest=conversion.manifest,
        plan=plan,
        recipe=conversion.recipe,
        source_files={
            name: {"bytes": f.nbytes, "fingerprint": conversion.source_fingerprints[name]}
            for f in sources
            for name in (relative_name(f, conversion.location.root),)
        },
        compared=compared,
        weight_files=weights,
        files=files,
        notes=[*plan.notes, *generation_notes(config_dir), *loading_notes(conversion.side)],
    )
    write_json(workspace.model / RECORD_NAME, content)
    return content


def finished_files(planned: PlannedModel) -> list[WeightFileRecord]:
    """The records of all weight files.

    Raises:
        OutputError: a weight file has not been written.
    """
    workspace, weights = planned.workspace, []
    for file in planned.plan.files:
        record = workspace.finished(file.name)
        if record is None:
            raise OutputError("a weight file has not been written", file=workspace.model / file.name)
        weights.append(record)
    return weights


def add_side_files(
    planned: PlannedModel, weights: Sequence[WeightFileRecord], side: Mapping[str, bytes]
) -> dict[str, dict[str, Any]]:
    """Write side files and index beside the weight files; gives name → bytes and sha256 of all of them."""
    model, plan = planned.workspace.model, planned.plan
    files: dict[str, dict[str, Any]] = {r.name: {"bytes": r.nbytes, "sha256": r.sha256} for r in weights}
    _remove_strangers(model, set(files))
    for name, data in side.items():
        (model / name).parent.mkdir(exist_ok=True)
        write_durably(model / name, data)
        files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if len(plan.files) > 1:
        name = f"model{INDEX_SUFFIX}"
        data = write_json(model / name, weight_index(plan))
        files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return files


def _remove_strangers(directory: Path, known: set[str]) -> None:
    for entry in directory.iterdir():
        if entry.name not in known:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def convert(request: ConvertRequest, on_plan: Callable[[Conversion], Progress | None] | None = None) -> dict[str, Any]:
    """The whole conversion in this process.

    Args:
        request: what to do.
        on_plan: called once the plan is known; gives the callback that is told how many output bytes were done.

    Returns:
        The content of ``ckptflow.json``.

    Raises:
        CkptflowError: refused or failed; nothing is left at OUT.
    """
    conversion = plan_conversion(request)
    with in_use(conversion.location.path), claim(conversion) as record:
        if record is not None:
            return record
        check_replicas(conversion)
        progress = on_plan(conversion) if on_plan is not None else None
        for number in range(len(conversion.plan.files)):
            write_file(conversion, number, progress)
        return finish(conversion)
