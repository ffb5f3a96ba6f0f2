"""From a checkpoint to a model on S3 without a local copy: the bytes go into multipart parts while they are produced.

The order is that of a local conversion and its upload: weight files, proof, other files, index, and ``ckptflow.json``
last. Nothing but weight files is at the destination before the proof, which reads them back from there.

``stream`` does it all in one process. A flow calls, under ``claim_stream``, ``prepare_stream``, ``stream_file`` for
each weight file, ``prove_stream`` and ``publish_stream``; each looks at the destination itself.
"""

from __future__ import annotations

from ckptflow.publish.streaming.base import Streaming
from ckptflow.publish.streaming.claim import claim_stream
from ckptflow.publish.streaming.files import StreamedFile, stream_file
from ckptflow.publish.streaming.finish import prove_stream, publish_stream
from ckptflow.publish.streaming.look import prepare_stream
from ckptflow.publish.streaming.whole import stream

__all__ = [
    "StreamedFile",
    "Streaming",
    "claim_stream",
    "prepare_stream",
    "prove_stream",
    "publish_stream",
    "stream",
    "stream_file",
]
