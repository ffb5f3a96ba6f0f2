"""The order of things in an upload, the same for each target.

A destination is in one of three states: nothing of a model, part of one (no marker), or all of one (the marker,
``ckptflow.json``, is there). The marker is put last, after each file was proven, and taken away first.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from ckptflow.publish import refusals
from ckptflow.publish.fileprogress import FileProgress
from ckptflow.publish.inorder import GoOn, send_in_order
from ckptflow.publish.model import (
    MARKER_NAME,
    LocalFile,
    LocalModel,
    is_index_name,
    is_loaded_name,
    marker_in,
    read_local_model,
)
from ckptflow.publish.place import check_free, look_at
from ckptflow.publish.records import PublishedFile, PublishRecord
from ckptflow.publish.settings import PublishSettings
from ckptflow.publish.targets import Progress, Target, open_target

#: While one model takes another's place, the names of the other's files; a killed run leaves it for the next.
REPLACED_NAME = ".ckptflow-replaced.json"

_log = logging.getLogger(__name__)


def upload(
    out_dir: Path,
    destination_uri: str,
    *,
    settings: PublishSettings | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> PublishRecord:
    """Publish a finished model directory, or prove that it is published already.

    Safe to kill and to run again: finished files are proven and not sent a second time. Safe to run twice at once.

    Args:
        out_dir: directory with weight files and ``ckptflow.json``; only files that the record names are published.
        destination_uri: ``file:///DIR``, ``s3://BUCKET/PREFIX`` or ``hf://ORG/NAME[@BRANCH]``.
        settings: how to publish.
        progress: called with bytes done since the last call; the sum is ``read_local_model(out_dir).total_bytes``.
        overwrite: let this model take the place of another at the destination. Removed are files that the other
            model's record names, and weight files and indexes beside that would be loaded; all else is left.

    Raises:
        OutputError, VerificationError: the local directory is not what its record says.
        UsageError: the destination is not one.
        TransientPublishError: the store failed in a way that may heal; run it again.
        PermanentPublishError: the store refused, or the destination holds something else, or, even for ``overwrite``,
            a trainer's checkpoint.
    """
    model = read_local_model(out_dir)
    with closing(open_target(destination_uri, settings or PublishSettings())) as target:
        return publish(model, target, progress=progress, overwrite=overwrite)


def publish(
    model: LocalModel, target: Target, *, progress: Progress | None = None, overwrite: bool = False
) -> PublishRecord:
    """``upload`` of a model whose record was read, to a target that is open.

    Raises:
        CkptflowError: as ``upload``.
    """
    started = time.monotonic()
    publication = _Publication(model=model, target=target, progress=progress, overwrite=overwrite)
    files, already_published = publication.run()
    return PublishRecord(
        uri=target.uri,
        state="published",
        already_published=already_published,
        fingerprint=model.marker.fingerprint,
        files=tuple(files),
        seconds=time.monotonic() - started,
        revision=target.revision,
    )


def make_room(target: Target, marker_content: bytes | None, in_the_way: Collection[str]) -> None:
    """Take away the marker of another model, if there is one, then files that stand in the way of a new one's.

    The names of the other model's files are kept there for ``publish``, which removes those that are left.
    """
    if marker_content is not None:
        # Without this list a run after a kill could not tell an earlier model's files from a stranger's.
        earlier = marker_in(marker_content)
        names = set(_stale_names(target)) | set(() if earlier is None else earlier.files)
        target.delete_file(REPLACED_NAME)
        target.put_bytes(REPLACED_NAME, json.dumps({"files": sorted(names)}).encode())
        target.delete_file(MARKER_NAME)
    for name in in_the_way:
        target.delete_file(name)


def _stale_names(target: Target) -> list[str]:
    content = target.read_file(REPLACED_NAME)
    try:
        return [str(name) for name in json.loads(content or b'{"files": []}')["files"]]
    except (ValueError, KeyError, TypeError):
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prior:
    """What was found at the destination.

    ``marker_content`` is that of the marker there, ``is_same`` says that it is this model's; ``proven`` are files of
    this model that are there and equal, with the proof, ``differing`` those that are there with another content;
    ``foreign`` are names that this model does not have.
    """

    marker_content: bytes | None
    is_same: bool
    proven: Mapping[str, str]
    differing: Collection[str]
    foreign: Collection[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Publication:
    """One call of ``upload``."""

    model: LocalModel
    target: Target
    progress: Progress | None
    overwrite: bool
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> tuple[list[PublishedFile], bool]:
        """All files as published, and whether that was so before."""
        self.target.prepare(self.model)
        prior = self._look()
        if prior.is_same and len(prior.proven) == len(self.model.files):
            files = [self._held(file, prior.proven[file.name]) for file in self.model.files]
            self._tell(len(self.model.marker_content))
            return [*files, self._marker_file(is_sent=False)], True
        self._make_room(prior)
        files = self._send_all(prior)
        self._remove_stale(prior)
        return [*files, self._finish()], False

    def _send_all(self, prior: _Prior) -> list[PublishedFile]:
        def send(file: LocalFile, go_on: GoOn) -> PublishedFile:
            return self._send(file, prior.proven.get(file.name), go_on)

        first = next((file.name for file in self.model.files if file.name not in prior.proven), "")
        large_at_once = self.target.large_files_at_once
        return send_in_order(self.model.files, send, first=first, large_at_once=large_at_once)

    def _look(self) -> _Prior:
        place = look_at(self.target)
        content, listing = place.marker_content, place.listing
        is_same = content is not None and self._is_this_model(content)
        names = {file.name for file in self.model.files}
        if not is_same:
            check_free(self.target.uri, place, self.model.marker, names, overwrite=self.overwrite)
        proven: dict[str, str] = {}
        differing: list[str] = []
        for file in self.model.files:
            if file.name not in listing:
                continue
            proof = self.target.prove_file(file)
            if proof is None:
                differing.append(file.name)
            else:
                proven[file.name] = proof
        if differing and not is_same and not self.overwrite:
            raise refusals.foreign_files(self.target.uri, differing)
        return _Prior(
            marker_content=content,
            is_same=is_same,
            proven=proven,
            differing=differing,
            foreign=frozenset(place.foreign(names)),
        )

    def _is_this_model(self, content: bytes) -> bool:
        return marker_in(content) == self.model.marker

    def _make_room(self, prior: _Prior) -> None:
        """Take away the marker, so that the destination holds no model, then what stands in the way."""
        if not prior.is_same:
            make_room(self.target, prior.marker_content, prior.differing)
            return
        _log.warning("%s: files are missing or damaged; they are sent again", self.target.uri)
        self.target.delete_file(MARKER_NAME)
        for name in prior.differing:
            self.target.delete_file(name)

    def _remove_stale(self, prior: _Prior) -> None:
        if not self.overwrite:
            return
        # A stale index or weight file would be loaded in place of ours; a stranger's notes would not.
        misleading = {n for n in prior.foreign if "/" not in n and (is_loaded_name(n) or is_index_name(n))}
        stale = (set(_stale_names(self.target)) & set(prior.foreign)) | misleading
        for name in sorted(stale - {file.name for file in self.model.files}):
            _log.info("%s: %s of an earlier model is removed", self.target.uri, name)
            self.target.delete_file(name)
        self.target.delete_file(REPLACED_NAME)

    def _send(self, file: LocalFile, proof: str | None, go_on: GoOn) -> PublishedFile:
        if proof is not None:
            return self._held(file, proof)
        file_progress = FileProgress(file.bytes, self.progress, self.lock)

        def tell(done_bytes: int) -> None:
            go_on()
            file_progress.add(done_bytes)

        is_sent = self.target.put_file(file, tell)
        proof = self.target.prove_file(file)
        if proof is None:
            uri = self.target.uri
            raise refusals.not_held(uri, file) if is_sent else refusals.overtaken(uri, f"another {file.name}")
        self.target.tidy_file(file.name)
        file_progress.finish()
        return _published(file, proof, is_sent=is_sent)

    def _held(self, file: LocalFile, proof: str) -> PublishedFile:
        """A file that was there before."""
        self.target.tidy_file(file.name)
        self._tell(file.bytes)
        return _published(file, proof, is_sent=False)

    def _tell(self, done_bytes: int) -> None:
        if self.progress is not None:
            with self.lock:
                self.progress(done_bytes)

    def _finish(self) -> PublishedFile:
        before = self._listing_of_model()
        if not self.target.put_bytes(MARKER_NAME, self.model.marker_content):
            content = self.target.read_file(MARKER_NAME)
            if content is None or not self._is_this_model(content):
                raise refusals.overtaken(self.target.uri, "another model's record")
            _log.info("%s: another run published the same model first", self.target.uri)
            self._tell(len(self.model.marker_content))
            return self._marker_file(is_sent=False)
        if self.target.read_file(MARKER_NAME) != self.model.marker_content or self._listing_of_model() != before:
            self.target.delete_file(MARKER_NAME)
            raise refusals.disturbed(self.target.uri, "files that changed while the record was put")
        self._tell(len(self.model.marker_content))
        return self._marker_file(is_sent=True)

    def _listing_of_model(self) -> dict[str, str]:
        listing = self.target.list_files()
        missing = [file.name for file in self.model.files if file.name not in listing]
        if missing:
            raise refusals.disturbed(self.target.uri, f"no {missing[0]}, which was there a moment ago")
        return {file.name: listing[file.name] for file in self.model.files}

    def _marker_file(self, *, is_sent: bool) -> PublishedFile:
        content = self.model.marker_content
        return PublishedFile(
            name=MARKER_NAME,
            bytes=len(content),
            sha256=sha256(content).hexdigest(),
            verified_by="read back" if is_sent else "read back: same fingerprint and files",
            outcome="sent" if is_sent else "skipped",
        )


def _published(file: LocalFile, proof: str, *, is_sent: bool) -> PublishedFile:
    return PublishedFile(
        name=file.name,
        bytes=file.bytes,
        sha256=file.sha256,
        verified_by=proof,
        outcome="sent" if is_sent else "skipped",
    )
