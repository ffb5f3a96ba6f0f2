"""post-training: one checkpoint, end to end. Safe to run twice, resumes where it was killed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.context import TagsContext
from prefect.exceptions import TerminationSignal
from prefect.states import Failed

from ckptflow.convert import claim
from ckptflow.discovery.destinations import label_of
from ckptflow.discovery.discover import SETTLE_SECONDS
from ckptflow.errors import (
    CheckpointError,
    CkptflowError,
    DestinationTakenError,
    NotACheckpointError,
    UsageError,
    ValueRefusedError,
    VerificationError,
)
from ckptflow.files.locks import exclusive, in_use
from ckptflow.formats.base import Location
from ckptflow.formats.registry import locate
from ckptflow.publish.several import Destination
from ckptflow.request import ConvertRequest
from ckptflow_flows.ending import ask_briefly, end_in_time
from ckptflow_flows.publication import Publication
from ckptflow_flows.runners import Workers, one_server
from ckptflow_flows.settings import PostTraining
from ckptflow_flows.streaming import stream_model
from ckptflow_flows.takingover import take_over
from ckptflow_flows.workplace import Workplace
from ckptflow_tasks.planning import planned
from ckptflow_tasks.proving import Proven, validate_model
from ckptflow_tasks.reading import Inspected, cast_plan, inspect_checkpoint, shrink_plan
from ckptflow_tasks.shrinking import shrink_source
from ckptflow_tasks.step import heals, with_slot
from ckptflow_tasks.writing import check_equal, finish_model, merge_files

# What running again on the same bytes gives again: the checkpoint, or what is in its place, is at fault.
REFUSALS = (CheckpointError, ValueRefusedError, VerificationError, UsageError, DestinationTakenError)


def _flow_run_name() -> str:
    # Prefect gives the validated model here in some cases and the plain parameters in others.
    checkpoint = runtime.flow_run.parameters["checkpoint"]
    path = Path(checkpoint["path"] if isinstance(checkpoint, dict) else checkpoint.path)
    try:
        return f"post-training {label_of(locate(path))}"
    except CheckpointError:
        return f"post-training {path.name}"


@flow(
    name="post-training",
    flow_run_name=_flow_run_name,
    task_runner=Workers().prefect_runner(),
    persist_result=False,
    validate_parameters=True,
)
def post_training(checkpoint: PostTraining) -> Any:
    """Turn one checkpoint into a published model: inspect, shrink, cast, merge, validate, upload.

    Done is seen at the destinations: those that have the model already are left alone. One that fails does not keep it
    from the others; the run has failed then, and the next one sends what is missing. Two runs on one checkpoint take
    turns, and the second one finds the work done.

    Args:
        checkpoint: which checkpoint, what to make of it, and where to publish it.
    """
    logger = get_run_logger()
    end_in_time()
    try:
        location = locate(checkpoint.path)
        label = label_of(location)
        place = Workplace.of(checkpoint.machine, location)
        with TagsContext(current_tags=set()):  # a run's tags are not its tasks': each of those costs a request
            state = _publish_missing(checkpoint, location, place, label)
    except CkptflowError as error:
        # A file that could not be read, as often as it was tried, says nothing against the checkpoint.
        if isinstance(error, REFUSALS) and not heals(error):
            reason = _deleted(checkpoint.path, error) if _is_gone(checkpoint.path) else error
            logger.error("refused: %s", reason)
            return refused(reason)
        logger.error("failed: %s", error)
        return Failed(message=_in_one_line(error), data=error)
    except TerminationSignal:
        ask_briefly()
        raise
    logger.log(logging.INFO if state.is_completed() else logging.ERROR, "%s", state.message)
    return state


def refused(error: Exception) -> State[Any]:
    """A failed state that says: the checkpoint is bad, or its place is taken; the machine is not at fault."""
    return Failed(name="Refused", message=_in_one_line(error), data=error)


def _is_gone(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:  # a file server that hiccups
        return False
    return False


def _deleted(path: Path, error: CkptflowError) -> CkptflowError:
    """What to say of a checkpoint that training rotated away while its run waited or worked."""
    return NotACheckpointError(
        "the checkpoint is not there any more, or never was",
        file=path,
        found=error.what,
        fix="let training keep its steps for longer, or have more workers; if it never was there, correct the path",
    )


def _in_one_line(error: Exception) -> str:
    # The UI folds lines into one.
    return "; ".join(line.strip() for line in str(error).splitlines())


def _publish_missing(checkpoint: PostTraining, location: Location, place: Workplace, label: str) -> State[Any]:
    """The whole work, for the destinations that lack the model; gives the flow's final state."""
    destinations = [destination.place() for destination in checkpoint.destinations]
    publication = Publication(location=location, destinations=destinations, label=label, was_left=place.was_left())
    tell = partial(get_run_logger().info, "another run works on %s; waiting for its end", label)
    # Both: where the work is done, which other hosts see as well, and the checkpoint, wherever it is done.
    with in_use(location.path), exclusive(place.lock, tell):
        take_over(place.lock)
        try:
            missing = publication.look(checkpoint.convert_request(place.out))
            if missing and checkpoint.machine.shrink_source:
                shrink_source(location, SETTLE_SECONDS, label)  # before anything is planned: it changes the files
            if missing:
                _publish_at(missing, publication, checkpoint, place)
            state = publication.end()
        except REFUSALS:
            place.tidy(keep=False)  # what was made of a refused checkpoint must not look finished
            raise
        if state.is_completed() or state.name == "Refused":
            place.tidy(keep=checkpoint.machine.keep_local)
    return state


def _publish_at(
    missing: Sequence[Destination], publication: Publication, checkpoint: PostTraining, place: Workplace
) -> None:
    """The model, made and proven, at each destination that would take it."""
    request, label = checkpoint.convert_request(place.out), publication.label
    inspected = inspect_checkpoint(request, label)
    missing = publication.ask(request, inspected, missing)
    if not missing:
        return
    inspected = cast_plan(request, shrink_plan(request, inspected, label), label)
    if checkpoint.machine.no_local_copy:
        there = missing[0].for_checkpoint(publication.location)
        how, forward = checkpoint.verify_options(), checkpoint.validation.forward
        record = stream_model(request, inspected, there, label, forward=forward, options=how)
        publication.sent(missing[0], record)
    else:
        publication.send(_proven_model(checkpoint, request, inspected, place, label), missing)


def _proven_model(
    checkpoint: PostTraining, request: ConvertRequest, inspected: Inspected, place: Workplace, label: str
) -> Proven:
    """The model, made and proven by this run or by one before it that could not publish it everywhere."""
    directory = _make(request, inspected, label)
    how, forward = checkpoint.verify_options(), checkpoint.validation.forward
    proven = place.proven_before(how, forward)
    if proven is None:
        proven = with_slot(validate_model, directory, checkpoint.path, label, forward, how)
        place.note_proof(proven, how, forward)
    return proven


def _make(request: ConvertRequest, inspected: Inspected, label: str) -> str:
    """The model directory, of this run or of one before it."""
    with claim(planned(request, inspected.fingerprint)) as record:
        if record is not None:
            return str(request.out)
        inspected = check_equal(request, inspected, label)
        with one_server():
            files = with_slot(merge_files, request, inspected, label)
        return finish_model(request, inspected, label, files)
