"""What is streamed, and where to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ckptflow.conversion import Conversion
from ckptflow.engine.options import EngineOptions
from ckptflow.errors import OutputError
from ckptflow.plan import WeightFile
from ckptflow.publish.model import LocalFile
from ckptflow.publish.settings import PublishSettings
from ckptflow.publish.streaming.state import StreamState
from ckptflow.publish.streaming.streamed import Streamed
from ckptflow.publish.streaming.target import StreamTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """One model on its way to one destination.

    Half of the conversion's memory budget is the engine's, the other half holds parts.

    Attributes:
        conversion: what is made. Nothing appears at its OUT; beside it lies a small hidden directory meanwhile.
        uri: ``s3://BUCKET/PREFIX``.
        settings: how to publish.
        overwrite: as for ``upload``.
    """

    conversion: Conversion
    uri: str
    settings: PublishSettings = field(default_factory=PublishSettings)
    overwrite: bool = False

    @property
    def files(self) -> Sequence[WeightFile]:
        """The weight files."""
        return self.conversion.plan.files

    @property
    def state(self) -> StreamState:
        """What is kept between runs."""
        return StreamState(workspace=self.conversion.workspace, uri=self.uri)

    @property
    def engine_options(self) -> EngineOptions:
        """The conversion's, with the engine's share of the memory."""
        options = self.conversion.engine_options
        return replace(options, memory_budget_bytes=options.memory_budget_bytes // 2)

    def local(self, name: str, *, bytes: int, sha256: str) -> LocalFile:
        """A file of the model as it would lie in the hidden directory, where all but the weight files do."""
        return LocalFile(name=name, path=self.conversion.workspace.model / name, bytes=bytes, sha256=sha256)

    def all_streamed(self) -> list[Streamed]:
        """What was streamed, file by file.

        Raises:
            OutputError: a weight file is missing.
        """
        found = []
        for file in self.files:
            streamed = self.state.streamed(file.name)
            if streamed is None:
                raise OutputError(
                    "a weight file was not streamed", file=f"{self.uri}/{file.name}", fix="stream it first, then go on"
                )
            found.append(streamed)
        return found

    def open_target(self) -> StreamTarget:
        """A connection to the destination.

        Raises:
            UsageError: it isn't on S3.
        """
        return StreamTarget(self.uri, self.settings, self.conversion.request.memory_budget_bytes // 2)
