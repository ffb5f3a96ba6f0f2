"""From a config to a model directory with fresh weights, file by file, in bounded memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckptflow
from ckptflow.convert import Progress, add_side_files, claim, finished_files
from ckptflow.dtypes import numpy_dtype
from ckptflow.engine.blocks import Part
from ckptflow.engine.digest import FileDigest
from ckptflow.engine.execute import Cancel
from ckptflow.engine.gather import Gatherer
from ckptflow.engine.options import Buffers, EngineOptions, plan_buffers
from ckptflow.engine.pipeline import Pipeline
from ckptflow.engine.record import WeightFileRecord
from ckptflow.engine.scan import ValueRange, scan
from ckptflow.engine.sources import SourceFiles
from ckptflow.engine.writer import NewFile, padded, page_buffer
from ckptflow.files.jsonfiles import write_json
from ckptflow.files.kinds import RECORD_NAME
from ckptflow.output.record import RECORD_FORMAT
from ckptflow.output.safetensors import weight_file_header
from ckptflow.plan import WeightFile
from ckptflow.seeding.drawing import Drawer
from ckptflow.seeding.planning import Seeding, plan_seeding
from ckptflow.seeding.request import SeedRequest


class DrawingPipeline(Pipeline):
    """The engine's threads and buffers, with values that are drawn and not read."""

    def __init__(
        self,
        file: WeightFile,
        drawers: list[Drawer],
        sources: SourceFiles,
        out: NewFile,
        data_begin: int,
        options: EngineOptions,
        buffers: Buffers,
    ) -> None:
        super().__init__(file, sources, out, data_begin, options, buffers)
        self._drawers = drawers

    def _fill_part(self, buffer: Any, part: Part, gatherer: Gatherer) -> ValueRange:
        import numpy as np

        dtype = self._file.tensors[part.number].dtype
        out = np.frombuffer(buffer.memory, numpy_dtype(dtype), part.stop - part.start, part.at)
        self._drawers[part.number].fill(out, part.start)
        return scan(out, dtype, canonical_nan=False)


def write_seed_file(
    seeding: Seeding, number: int, progress: Progress | None = None, cancel: Cancel | None = None
) -> WeightFileRecord:
    """Write weight file ``number`` (from 0), unless it is finished already. Call it under ``claim``.

    Raises:
        OutputError: it can't be written, or ``cancel`` was set.
        ValueRefusedError: the dtype has no room for a value.
    """
    file, workspace = seeding.plan.files[number], seeding.workspace
    record = workspace.finished(file.name)
    if record is not None:
        if progress is not None:
            progress(file.data_bytes)
        return record
    record = _write(seeding, file, workspace.model / file.name, progress, cancel)
    workspace.keep(record)
    return record


def _write(
    seeding: Seeding, file: WeightFile, path: Path, progress: Progress | None, cancel: Cancel | None
) -> WeightFileRecord:
    begin = time.perf_counter()
    options, header = seeding.engine_options, weight_file_header(file)
    fresh = {tensor.fqn: tensor for tensor in seeding.model.tensors}
    drawers = [Drawer(fresh[tensor.fqn], seeding.request.seed) for tensor in file.tensors]
    nbytes = len(header) + file.data_bytes
    digest = FileDigest(file, header)
    with SourceFiles() as sources, NewFile(path, nbytes, direct_io=options.direct_io, durable=options.durable) as out:
        out.write(page_buffer(len(header), header), 0)
        buffers = plan_buffers(options, file)
        DrawingPipeline(file, drawers, sources, out, len(header), options, buffers).run(digest, progress, cancel)
        out.commit()
    return WeightFileRecord(
        name=file.name,
        nbytes=nbytes,
        sha256=digest.sha256(),
        tensors=digest.tensors(),
        seconds=time.perf_counter() - begin,
        read_bytes=0,
        written_bytes=padded(nbytes),
    )


def finish_seeding(seeding: Seeding) -> dict[str, Any]:
    """Add side files, index and record, and rename the whole to OUT. Call it under ``claim``.

    Returns:
        The content of ``ckptflow.json``.

    Raises:
        OutputError: a weight file has not been written.
    """
    weights = finished_files(seeding)
    files = add_side_files(seeding, weights, seeding.side)
    content = _record(seeding, weights, files)
    write_json(seeding.workspace.model / RECORD_NAME, content)
    seeding.workspace.publish()
    return content


def _record(seeding: Seeding, weights: list[WeightFileRecord], files: dict[str, Any]) -> dict[str, Any]:
    """The content of ``ckptflow.json``, in the form of a conversion's."""
    import numpy as np

    fresh = {tensor.fqn: tensor for tensor in seeding.model.tensors}
    kept = {tensor.fqn: tensor.kept_reason for tensor in seeding.plan.tensors if tensor.kept_reason is not None}
    tensors = {}
    for file in weights:
        for record in file.tensors:
            entry = {"file": file.name, **record.to_json(), "source": []}
            entry.pop("fqn", None)
            entry["drawn"] = "; then ".join(str(fill.kind) for fill in fresh[record.fqn].fills)
            entry["kind"] = "buffer" if fresh[record.fqn].is_buffer else "parameter"
            if record.fqn in kept:
                entry["kept_reason"] = kept[record.fqn]
            tensors[record.fqn] = entry
    return {
        "format": RECORD_FORMAT,
        "fingerprint": seeding.fingerprint,
        "created_by": f"ckptflow {ckptflow.__version__}",
        "source": {
            "name": seeding.model.architecture,
            "layout": "seed",
            "global_step": 0,
            "world_size": None,
            "mesh": None,
            "files": {},
        },
        "recipe": seeding.recipe,
        "drawn_by": f"numpy {np.__version__}",
        "files": files,
        "tensors": tensors,
        "ties": dict(seeding.plan.ties),
        "left_out": [],
        "notes": list(seeding.notes),
    }


def seed_model(request: SeedRequest, on_plan: Callable[[Seeding], Progress | None] | None = None) -> dict[str, Any]:
    """The whole work in this process.

    Args:
        request: what to make.
        on_plan: called once the plan is known; gives the callback that is told how many output bytes were done.

    Returns:
        The content of ``ckptflow.json``.

    Raises:
        CkptflowError: refused or failed; nothing is left at OUT.
    """
    seeding = plan_seeding(request)
    with claim(seeding) as record:
        if record is not None:
            return record
        progress = on_plan(seeding) if on_plan is not None else None
        for number in range(len(seeding.plan.files)):
            write_seed_file(seeding, number, progress)
        return finish_seeding(seeding)
