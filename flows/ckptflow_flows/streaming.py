"""The middle of post-training for a model that goes to S3 without a local copy."""

from __future__ import annotations

from ckptflow.publish.records import PublishRecord
from ckptflow.publish.several import Destination
from ckptflow.publish.streaming import claim_stream
from ckptflow.request import ConvertRequest
from ckptflow.validate.verify import VerifyOptions
from ckptflow_tasks.reading import Inspected
from ckptflow_tasks.step import with_slot
from ckptflow_tasks.streaming import prepare_destination, stream_files, streaming_of, upload_rest, validate_stored
from ckptflow_tasks.writing import check_equal


def stream_model(
    request: ConvertRequest,
    inspected: Inspected,
    destination: Destination,
    label: str,
    *,
    forward: bool,
    options: VerifyOptions,
) -> PublishRecord:
    """Make the model at its destination.

    Args:
        request: what to make; a small hidden directory lies beside ``out`` meanwhile.
        inspected: the plan of it.
        destination: of this model alone.
        label: of the checkpoint, for names.
        forward: load the model and run it, where it may be fetched for that.
        options: limits of the proof.

    Raises:
        CkptflowError: refused or failed; what was sent of a refused model is taken away.
    """
    place = destination.uri
    with claim_stream(streaming_of(request, inspected, destination)):
        published = prepare_destination(request, inspected, destination, label, place)
        if published is not None:
            return published
        inspected = check_equal(request, inspected, label)
        files = with_slot(stream_files, request, inspected, destination, label, place)
        files = with_slot(validate_stored, request, inspected, destination, files, forward, options, label, place)
        return upload_rest(request, inspected, destination, files, label, place)
