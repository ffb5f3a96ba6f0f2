"""Where one checkpoint's model is made, and the lock that says that a run is at it, or died of it."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptflow.discovery.destinations import work_lock, work_path
from ckptflow.files.hidden import hidden_beside
from ckptflow.files.jsonfiles import write_json
from ckptflow.files.locks import is_held
from ckptflow.formats.base import Location
from ckptflow.output.record import read_record
from ckptflow.publish.model import MARKER_NAME
from ckptflow.validate.verify import VerifyOptions
from ckptflow_flows.settings import Machine

if TYPE_CHECKING:
    from ckptflow_tasks.proving import Proven


@dataclass(frozen=True, slots=True)
class Workplace:
    """The directory ``out`` of a model in the making."""

    out: Path

    @classmethod
    def of(cls, machine: Machine, location: Location) -> Workplace:
        """The same for each run on the same checkpoint."""
        return cls(work_path(location, machine.work_dir))

    @property
    def lock(self) -> Path:
        """Held by the run that is at work here; it removes the file when it has done all that there was to do."""
        return work_lock(self.out)

    @property
    def _proof(self) -> Path:
        return hidden_beside(self.out, ".proven.json")

    def proven_before(self, how: VerifyOptions, forward: bool) -> Proven | None:
        """The proof of the model that is here, if a run before this one proved it in the same way."""
        from ckptflow_tasks.proving import Proven  # brings Prefect, which who only looks does without

        try:
            noted = json.loads(self._proof.read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        same = noted.pop("of") == self._subject(how, forward)
        return Proven(directory=str(self.out), **noted) if same else None

    def note_proof(self, proven: Proven, how: VerifyOptions, forward: bool) -> None:
        """Remember a proof, for a run that comes here because a destination failed this one."""
        noted = {
            "of": self._subject(how, forward),
            "checks": proven.checks,
            "elements_compared": proven.elements_compared,
        }
        write_json(self._proof, noted)

    def _subject(self, how: VerifyOptions, forward: bool) -> list[str]:
        # The record names source and files with their sums; files that changed since are refused by the upload.
        record = self.out / MARKER_NAME
        sha256 = hashlib.sha256(record.read_bytes()).hexdigest() if record.is_file() else "none"
        return [sha256, str(forward), repr(how)]

    def was_left(self) -> bool:
        """Whether a run ended here before it was through: killed, or failed.

        Raises:
            OutputError: the lock can't be asked.
        """
        return self.lock.exists() and not is_held(self.lock)

    def tidy(self, keep: bool) -> None:
        """Remove the model, unless it is kept, what is noted, and the directory above where it is empty then."""
        if not keep and read_record(self.out) is not None:  # without a record it is somebody else's directory
            shutil.rmtree(self.out)
        self._proof.unlink(missing_ok=True)
        self.lock.unlink()
        with suppress(OSError):  # not empty: other runs work there
            self.out.parent.rmdir()
