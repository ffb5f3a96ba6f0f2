"""What the Hub double keeps: repositories with commits, branches, tags and LFS objects, in a directory."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GITATTRIBUTES = "".join(
    f"*.{end} filter=lfs diff=lfs merge=lfs -text\n" for end in ("safetensors", "bin", "pt", "gguf")
)
#: The real Hub refuses larger files that are not LFS.
REGULAR_LIMIT_BYTES = 10 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file in a tree: git blob sha1, size in bytes, and the sha256 where it is an LFS file."""

    oid: str
    size: int
    sha256: str | None = None

    def to_json(self, path: str) -> dict[str, Any]:
        """As the tree listing has it."""
        lfs = {"lfs": {"oid": self.sha256, "size": self.size, "pointerSize": 134}} if self.sha256 else {}
        return {"type": "file", "path": path, "size": self.size, "oid": self.oid, **lfs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One commit."""

    oid: str
    parent: Commit | None
    title: str
    message: str
    files: Mapping[str, Entry]

    def history(self) -> list[Commit]:
        """This commit and those before, newest first."""
        return [self, *(self.parent.history() if self.parent else [])]


@dataclass(slots=True)
class Repo:
    """One repository; ``order`` are the paths of each commit as they came."""

    directory: Path
    private: bool
    branches: dict[str, Commit] = field(default_factory=dict)
    tags: dict[str, Commit] = field(default_factory=dict)
    order: list[list[str]] = field(default_factory=list)
    #: Bytes that came for each LFS object, and how often one was stored.
    received_bytes: Counter[str] = field(default_factory=Counter)
    stored: Counter[str] = field(default_factory=Counter)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        (self.directory / "lfs").mkdir(parents=True)
        (self.directory / "blobs").mkdir()
        self.branches["main"] = self._make(None, "initial commit", "", {".gitattributes": self.add_blob(GITATTRIBUTES)})

    def commit_of(self, revision: str) -> Commit | None:
        """The commit that a branch, a tag or an oid names."""
        with self.lock:
            named = self.branches.get(revision) or self.tags.get(revision)
            heads = [*self.branches.values(), *self.tags.values()]
            return named or next((c for head in heads for c in head.history() if c.oid == revision), None)

    def is_lfs(self, path: str, size: int) -> bool:
        """Whether the Hub wants a file of this name and size as LFS."""
        patterns = [line.split()[0] for line in GITATTRIBUTES.splitlines()]
        return size > REGULAR_LIMIT_BYTES or any(fnmatch.fnmatch(path.split("/")[-1], p) for p in patterns)

    def lfs_path(self, sha256: str) -> Path:
        """Where an LFS object lies."""
        return self.directory / "lfs" / sha256

    def add_blob(self, content: bytes | str) -> Entry:
        """Store a regular file."""
        data = content.encode() if isinstance(content, str) else content
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        (self.directory / "blobs" / oid).write_bytes(data)
        return Entry(oid=oid, size=len(data))

    def lfs_entry(self, sha256: str, size: int) -> Entry:
        """An LFS file, whose blob is a pointer."""
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
        return Entry(oid=self.add_blob(pointer).oid, size=size, sha256=sha256)

    def content(self, entry: Entry) -> bytes:
        """The bytes of a file."""
        return (self.lfs_path(entry.sha256) if entry.sha256 else self.directory / "blobs" / entry.oid).read_bytes()

    def commit(self, branch: str, title: str, message: str, changes: Mapping[str, Entry | None]) -> Commit:
        """Put a commit on a branch; None takes a file away."""
        with self.lock:
            parent = self.branches[branch]
            files = {**parent.files, **{path: entry for path, entry in changes.items() if entry is not None}}
            for path, entry in changes.items():
                if entry is None:
                    files.pop(path, None)
            self.order.append([path for path, entry in changes.items() if entry is not None])
            self.branches[branch] = self._make(parent, title, message, files)
            return self.branches[branch]

    def put(self, path: str, content: bytes, branch: str = "main") -> None:
        """What a person does past the client under test."""
        entry = self.add_blob(content)
        if self.is_lfs(path, len(content)):
            sha256 = hashlib.sha256(content).hexdigest()
            self.lfs_path(sha256).write_bytes(content)
            entry = self.lfs_entry(sha256, len(content))
        self.commit(branch, f"put {path}", "", {path: entry})

    def read_all(self, revision: str = "main") -> dict[str, bytes]:
        """All files of a revision; nothing where there is none."""
        commit = self.commit_of(revision)
        return {} if commit is None else {path: self.content(entry) for path, entry in commit.files.items()}

    def missing_objects(self) -> list[str]:
        """LFS files of any commit whose objects are not there: a reader would see a commit without its files."""
        with self.lock:
            heads = [*self.branches.values(), *self.tags.values()]
        entries = {(p, e) for head in heads for c in head.history() for p, e in c.files.items()}
        return sorted(path for path, e in entries if e.sha256 and not self.lfs_path(e.sha256).is_file())

    def _make(self, parent: Commit | None, title: str, message: str, files: Mapping[str, Entry]) -> Commit:
        facts = [parent and parent.oid, title, message, sorted((path, entry.oid) for path, entry in files.items())]
        oid = hashlib.sha1(json.dumps(facts).encode(), usedforsecurity=False).hexdigest()
        return Commit(oid=oid, parent=parent, title=title, message=message, files=dict(files))
