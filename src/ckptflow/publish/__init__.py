"""Publishing: a finished model directory goes to a destination, whole, once, and proven.

``upload`` is the one entry, ``publish_all`` calls it for several destinations; a kind of store is one module that has
the methods of ``Target``.
"""

from __future__ import annotations

from ckptflow.publish.model import MARKER_NAME, LocalModel, read_local_model
from ckptflow.publish.records import PublishedFile, PublishRecord
from ckptflow.publish.settings import PublishSettings
from ckptflow.publish.several import Destination, DestinationOutcome, publish_all
from ckptflow.publish.targets import Progress, Target, open_target
from ckptflow.publish.upload import upload

__all__ = [
    "MARKER_NAME",
    "Destination",
    "DestinationOutcome",
    "LocalModel",
    "Progress",
    "PublishRecord",
    "PublishSettings",
    "PublishedFile",
    "Target",
    "open_target",
    "publish_all",
    "read_local_model",
    "upload",
]
