"""merge: a task per weight file, in whatever process, inside one for all; then one that makes the directory whole.

The merge as a whole holds a slot of the limit on ``gpu``: one for each file would cost requests, or seconds of waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

from prefect import get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture, wait
from prefect.states import Cancelled
from prefect.utilities.annotations import unmapped

from ckptflow.cli.console import format_bytes
from ckptflow.conversion import Conversion
from ckptflow.convert import check_replicas, finish, write_file
from ckptflow.engine.record import WeightFileRecord
from ckptflow.errors import CheckpointError, OutputError, SourceChangedError
from ckptflow.files.locks import exclusive
from ckptflow.request import ConvertRequest
from ckptflow_tasks import artifacts
from ckptflow_tasks.limits import LIMITS
from ckptflow_tasks.orders import Order, Stop, WorkerError, ordered
from ckptflow_tasks.planning import planned
from ckptflow_tasks.reading import Inspected
from ckptflow_tasks.step import GPU, heals, step

Row = dict[str, Any]
Futures = list[PrefectFuture[Any]]


class FileTimeoutError(TimeoutError):
    """A weight file took longer than its limit."""


@contextmanager
def _merging(conversion: Conversion) -> Iterator[tuple[Order, Futures]]:
    """However the block is left, no task of it works on: those put into the list are told to stop and waited for.

    Otherwise they would go on to write into a directory that is cleared away or renamed meanwhile.
    """
    futures: Futures = []
    try:
        with ordered(conversion) as order:
            yield order, futures
    finally:
        wait(futures)


def _merged(order: Order, futures: Futures) -> list[Row]:
    """Wait for all of them; gives a row per weight file."""
    wait(futures)
    # A cancelled task only tells that another one failed, and that one may have been lost with its worker.
    states = [(future.state, future) for future in futures]
    cancelled = [future for state, future in states if state.is_cancelled()]
    failed = [future for state, future in states if state.is_failed()]
    others = [future for state, future in states if not (state.is_cancelled() or state.is_failed())]
    rows = [future.result() for future in (*failed, *others)]
    if cancelled and order.is_valid():
        raise WorkerError(
            "a worker does not see the work directory",
            file=order.permit.parent,
            fix="give a work directory on a file system that all workers have at the same path",
        )
    return rows + [future.result() for future in cancelled]


@step(
    "check-replicas",
    run_name="check replicas of {label}",
    timeout_seconds=LIMITS.compare_timeout_seconds,
)
def check_equal(request: ConvertRequest, inspected: Inspected, label: str) -> Inspected:
    """Prove that replicas, ties and 16-bit copies hold the bits that they must."""
    conversion = planned(request, inspected.fingerprint)
    check_replicas(conversion)
    pairs = len(conversion.plan.equal)
    get_run_logger().info(f"{pairs} pairs of tensors hold the same bits" if pairs else "no tensor is held twice")
    return inspected


@step("merge", run_name="merge {label}", timeout_seconds=None, tags=(GPU,), retries=0)
def merge_files(request: ConvertRequest, inspected: Inspected, label: str) -> list[Row]:
    """Write all weight files, several at a time; gives a row for each, by name.

    Raises:
        Exception: what the first file that failed raised; the others were stopped for it.
        WorkerError: a worker stopped that nobody had told to.
    """
    numbers = list(range(len(inspected.weight_files)))
    with _merging(planned(request, inspected.fingerprint)) as (order, futures):
        futures += merge_file.map(numbers, unmapped(request), unmapped(inspected), unmapped(label), unmapped(order))
        return sorted(_merged(order, futures), key=itemgetter("file"))


def _file_run_name() -> str:
    parameters = runtime.task_run.parameters
    return f"merge {parameters['label']} file {parameters['inspected'].position(parameters['number'])}"


@step("merge-file", run_name=_file_run_name, timeout_seconds=None)
def merge_file(
    number: int, request: ConvertRequest, inspected: Inspected, label: str, order: Order
) -> Row | State[Any]:
    """Write weight file ``number``, unless a run before this one, or a worker that was given up, finished it.

    Raises:
        FileTimeoutError: it took too long. Not retried: the next try would find the same stalled disk.
        SourceChangedError: this process sees other files than the one that planned.
        WorkerError: it has another version.
    """
    stop = Stop(order, LIMITS.file_timeout_seconds)
    try:
        record = _write(number, request, inspected, order, stop)
    except Exception as error:
        if isinstance(error, OutputError) and not order.is_valid():
            return _cancelled()
        is_late = isinstance(error, OutputError) and stop.is_late
        if is_late or not heals(error):
            order.withdraw()
        if is_late:
            raise FileTimeoutError(
                f"{inspected.weight_files[number]} was not written in {LIMITS.file_timeout_seconds:g} s; is the disk "
                "stalled? CKPTFLOW_FILE_TIMEOUT_SECONDS sets the limit"
            ) from error
        raise
    if record is None:
        return _cancelled()
    get_run_logger().info("%s: %s, sha256 %s", record.name, format_bytes(record.nbytes), record.sha256)
    return _row(record)


def _write(
    number: int, request: ConvertRequest, inspected: Inspected, order: Order, stop: Stop
) -> WeightFileRecord | None:
    """The record of the file, or None where it is no longer wanted."""
    if not order.is_valid():
        return None
    order.check_version()
    conversion = _as_ordered(request, inspected, order)
    file = conversion.plan.files[number]
    progress = artifacts.ByteProgress(f"file {inspected.position(number)}", file.data_bytes)
    # A cluster may give up a worker that still writes, and hand its file to another one.
    with exclusive(conversion.workspace.records / f"{file.name}.lock"):
        if not order.is_valid():
            return None
        record = write_file(conversion, number, progress, stop)
    progress.finish()
    return record


def _as_ordered(request: ConvertRequest, inspected: Inspected, order: Order) -> Conversion:
    try:
        return planned(request, inspected.fingerprint, order.sources)
    except SourceChangedError:
        raise
    except CheckpointError as error:  # the process of the flow could read it
        raise WorkerError(
            "this worker can't read the checkpoint",
            file=request.path,
            found=str(error),
            fix="mount the file system on all workers at the same path, readable for their user",
        ) from error


def _cancelled() -> State[Any]:
    return Cancelled(message="another weight file failed, or the run was ended")


def _row(record: WeightFileRecord) -> Row:
    seconds = max(record.seconds, 1e-6)
    return {
        "file": record.name,
        "tensors": len(record.tensors),
        "size": format_bytes(record.nbytes),
        "GB/s read": round(record.read_bytes / seconds / 1e9, 2),
        "seconds": round(record.seconds, 2),
        "sha256": record.sha256,
    }


@step("finish", run_name="finish {label}", timeout_seconds=LIMITS.metadata_timeout_seconds)
def finish_model(request: ConvertRequest, inspected: Inspected, label: str, files: list[Row]) -> str:
    """Add config, tokenizer, index and record, and rename the whole into place; gives the directory."""
    finish(planned(request, inspected.fingerprint))
    artifacts.table("merge", f"Weight files of {label}", files)
    return str(request.out)
