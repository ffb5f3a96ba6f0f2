"""The value of a metric at each global step, from files that trainers and evaluations leave.

Three shapes: ``trainer_state.json`` of the Hugging Face Trainer (its ``log_history``), JSON lines with a step and
metrics in each, and one JSON document: rows like those, or an object from step to value or to metrics.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

from ckptflow.errors import CheckpointError, CorruptFileError, IncompleteCheckpointError, UnsafeFileError
from ckptflow.files.jsonfiles import MAX_JSON_BYTES, read_json_object
from ckptflow.retention.pointers import TRAINER_STATE
from ckptflow.retention.units import StepUnit

STEP_KEYS = ("global_step", "step", "_step", "iteration", "trainer/global_step")
RUN_FILES = ("metrics.jsonl", "metrics.json")
_MAX_LINE_BYTES = 1 << 20
_STEP_KEY = re.compile(r"\d{1,255}")  # as in the name of a directory


def run_metrics(run: Path, units: Sequence[StepUnit], metric: str) -> dict[int, float]:
    """Global step → value, from the files that a run keeps; later rows take the place of earlier ones.

    Read are the newest ``trainer_state.json``, then ``metrics.jsonl`` or ``metrics.json`` of the run, then those in the
    step directories.

    Raises:
        CorruptFileError: a metrics file does not parse.
    """
    values: dict[int, float] = {}
    ordered = sorted((u for u in units if u.global_step is not None), key=lambda u: u.global_step or 0)
    for unit in ordered:
        try:
            history = read_json_object(unit.path / TRAINER_STATE).get("log_history")
        except (CheckpointError, OSError):
            continue  # not the Trainer's, or half written
        values |= values_in(history, metric)
    for name in RUN_FILES:
        if (run / name).is_file():
            values |= file_metrics(run / name, metric)
    for unit in ordered:
        for name in RUN_FILES:
            if (unit.path / name).is_file():
                values |= file_metrics(unit.path / name, metric, unit.global_step)
    return values


def file_metrics(path: Path, metric: str, global_step: int | None = None) -> dict[int, float]:
    """Global step → value, from one file.

    Args:
        path: JSON lines, or one JSON document.
        metric: its name.
        global_step: of rows that name none.

    Raises:
        IncompleteCheckpointError: there is no such file.
        CorruptFileError: it does not parse. The last line may be half written.
    """
    try:
        rows = _lines(path) if path.suffix == ".jsonl" else _rows_of(_document(path), metric)
        return values_in(rows, metric, global_step)
    except FileNotFoundError as error:
        raise IncompleteCheckpointError("no such file of metrics", file=path) from error


def values_in(rows: object, metric: str, global_step: int | None = None) -> dict[int, float]:
    """Global step → finite value of the metric, from rows; rows without it are passed over."""
    values: dict[int, float] = {}
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | Mapping):
        return values
    for row in rows:
        if not isinstance(row, Mapping):
            continue
        step = next((int(row[key]) for key in STEP_KEYS if _is_step(row.get(key))), global_step)
        value = row.get(metric)
        if step is not None and _is_number(value):
            values[step] = float(value)
    return values


def _is_step(value: object) -> TypeGuard[int | float]:
    return _is_number(value) and value % 1 == 0


def _is_number(value: object) -> TypeGuard[int | float]:
    """Finite, and not an integer beyond all floats, which JSON can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _lines(path: Path) -> Iterator[object]:
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(_MAX_LINE_BYTES):
            number += 1
            is_whole = line.endswith(b"\n")
            if not is_whole and len(line) == _MAX_LINE_BYTES:
                raise UnsafeFileError("a line is absurdly long", file=path, found=f"line {number}")
            try:
                if line.strip():
                    yield json.loads(line)
            except (ValueError, RecursionError) as error:
                if is_whole:
                    raise CorruptFileError("not valid JSON", file=path, found=f"line {number}: {error}") from error


def _document(path: Path) -> object:
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise UnsafeFileError("a file of metrics is absurdly large", file=path, found=f"{size} bytes", fix="use .jsonl")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptFileError("not valid JSON", file=path, found=str(error)) from error


def _rows_of(document: object, metric: str) -> object:
    """Rows of any of the shapes that a document may have."""
    if not isinstance(document, Mapping):
        return document
    if isinstance(document.get("log_history"), list):
        return document["log_history"]
    if document and all(_STEP_KEY.fullmatch(key) for key in document):
        return [
            {**(value if isinstance(value, Mapping) else {metric: value}), "global_step": int(step)}
            for step, value in document.items()
        ]
    return [document]
