"""The end of post-training: one model to each of its destinations, each with tasks, tries and an end of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar, cast

from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from ckptflow.errors import DestinationTakenError
from ckptflow.formats.base import Location
from ckptflow.publish.records import PublishRecord
from ckptflow.publish.several import Destination, DestinationOutcome, told_in_words
from ckptflow.request import ConvertRequest
from ckptflow_tasks.announcing import announce_published
from ckptflow_tasks.proving import Proven
from ckptflow_tasks.publishing import ask_destination, find_published, upload_model
from ckptflow_tasks.reading import Inspected

R = TypeVar("R")


@dataclass(slots=True, kw_only=True)
class Publication:
    """What becomes of one checkpoint's model at each of its destinations.

    Attributes:
        location: the checkpoint.
        destinations: that may hold the models of many checkpoints, in the order of publishing.
        label: of the checkpoint, for names.
        was_left: a run before this one did not come to its end: it may have published without saying so.
    """

    location: Location
    destinations: Sequence[Destination]
    label: str
    was_left: bool = False
    _found: list[Destination] = field(default_factory=list)
    _ended: dict[str, DestinationOutcome] = field(default_factory=dict)
    _records: list[PublishRecord] = field(default_factory=list)

    def look(self, request: ConvertRequest) -> list[Destination]:
        """The destinations that lack the model; one that can't be asked has failed, and is left out."""
        missing = []
        for destination in self.destinations:
            found = find_published(self.location, destination, request, self.label, destination.uri, return_state=True)
            answer = self._result(destination, found)
            if answer is False:
                missing.append(destination)
            elif answer is True:
                self._found.append(destination)
                self._note(destination)
                if self.was_left:
                    self._announce(destination, None)
        return missing

    def ask(self, request: ConvertRequest, inspected: Inspected, missing: Sequence[Destination]) -> list[Destination]:
        """Those that would take the model that is planned; any other one has failed, before the work and not after."""
        free = []
        for destination in missing:
            there = destination.for_checkpoint(self.location)
            asked = ask_destination(request, inspected, there, self.label, destination.uri, return_state=True)
            self._result(destination, asked)
            if asked.is_completed():
                free.append(destination)
        return free

    def send(self, proven: Proven, missing: Sequence[Destination]) -> None:
        """Publish at each, whatever became of those before."""
        for destination in missing:
            place = destination.for_checkpoint(self.location)
            uploaded = upload_model(proven, place, self.label, destination.uri, return_state=True)
            record = self._result(destination, uploaded)
            if record is not None:
                self.sent(destination, record)

    def sent(self, destination: Destination, record: PublishRecord) -> None:
        """Take note of a model that is published, and announce it."""
        self._note(destination)
        self._records.append(record)
        if self.was_left or not record.already_published:
            self._announce(destination, record)

    def end(self) -> State[Any]:
        """The final state of the run: completed where the model is at all destinations.

        Refused where something else is at those that lack it, which no further try changes.

        Raises:
            Exception: what went wrong at the only destination.
        """
        outcomes = [self._ended[each.uri] for each in self.destinations]
        failed = [each for each in outcomes if each.error is not None]
        if not failed:
            if len(self._found) == len(outcomes):
                message = f"{told_in_words(self.label, outcomes)} already"
                return Completed(name="AlreadyPublished", message=message)
            data = [asdict(record.model) for record in self._records]
            return Completed(message=told_in_words(self.label, outcomes), data=data)
        if len(outcomes) == 1:
            raise cast("Exception", failed[0].error)
        is_refused = all(isinstance(each.error, DestinationTakenError) for each in failed)
        name = "Refused" if is_refused else "Failed"
        return Failed(name=name, message=told_in_words(self.label, outcomes), data=failed[0].error)

    def _announce(self, destination: Destination, record: PublishRecord | None) -> None:
        place = destination.for_checkpoint(self.location)
        told = announce_published(place, record, self.location, self.label, destination.uri, return_state=True)
        self._result(destination, told)

    def _result(self, destination: Destination, state: State[R]) -> R | None:
        """The result of a task; None where it failed, which is the end of this destination and of no other."""
        result = state.result(raise_on_failure=False)
        if state.is_completed():
            return cast("R", result)
        error = result if isinstance(result, Exception) else RuntimeError(state.message or str(state.name))
        self._note(destination, error)
        return None

    def _note(self, destination: Destination, error: Exception | None = None) -> None:
        uri = destination.for_checkpoint(self.location).uri
        self._ended[destination.uri] = DestinationOutcome(uri=uri, error=error)
