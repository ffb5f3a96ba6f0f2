"""What the tests of publishing share: a model directory, and stores seen from outside the code under test."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import pytest

from ckptflow.publish import MARKER_NAME, PublishRecord, PublishSettings
from servers.hub import Hub
from servers.hubrepo import Repo
from servers.proxy import Proxy, running_proxy
from servers.seaweed import S3Server

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

MIB = 1 << 20
FAST = PublishSettings(part_size_bytes=8 * MIB, max_attempts=3, backoff_seconds=0.01, backoff_limit_seconds=0.05)
WEIGHT = "model-00001-of-00001.safetensors"
"""Of a model of one weight file."""

_PIECE_BYTES = 128 * MIB


def write_model(directory: Path, *, weight_bytes: tuple[int, ...] = (300_000, 200_001), seed: int = 0) -> Path:
    """A directory as ``ckptflow convert`` leaves it, with random weights; the seed is the fingerprint."""
    directory.mkdir(parents=True)
    count, noise = len(weight_bytes), random.Random(seed)
    contents = {
        # In pieces: randbytes itself makes less than 256 MiB.
        f"model-{number:05}-of-{count:05}.safetensors": b"".join(
            noise.randbytes(min(_PIECE_BYTES, size - offset)) for offset in range(0, size, _PIECE_BYTES)
        )
        for number, size in enumerate(weight_bytes, start=1)
    }
    weight_map = {f"layer.{name}": name for name in contents}
    contents["config.json"] = json.dumps({"model_type": "llama", "seed": seed}).encode()
    contents["tokenizer/empty.txt"] = b""
    contents["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    for name, content in contents.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    write_record(directory, list(contents), fingerprint=f"fingerprint-{seed}")
    return directory


def write_record(directory: Path, names: list[str], *, fingerprint: str) -> None:
    """The record of the files as they are."""
    files = {}
    for name in names:
        content = (directory / name).read_bytes()
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (directory / MARKER_NAME).write_text(json.dumps({"format": 1, "fingerprint": fingerprint, "files": files}))


def contents_of(directory: Path) -> dict[str, bytes]:
    """All files under a directory, by name."""
    if not directory.exists():
        return {}
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


class Store(Protocol):
    """A destination as a reader sees it.

    ``has_commits``: a model appears in one commit, and the store keeps contents that no file has any more.
    """

    has_commits: bool

    @property
    def uri(self) -> str: ...
    def read_all(self) -> dict[str, bytes]: ...
    def sizes(self) -> dict[str, int]: ...
    def put(self, name: str, content: bytes) -> None: ...
    def delete(self, name: str) -> None: ...
    def names_by_arrival(self) -> list[str]: ...
    def leftovers(self) -> list[str]: ...


@dataclass
class Directory:
    """A directory store."""

    path: Path
    has_commits: bool = False

    @property
    def uri(self) -> str:
        return self.path.as_uri()

    def read_all(self) -> dict[str, bytes]:
        return {name: content for name, content in contents_of(self.path).items() if not _is_temporary(name)}

    def sizes(self) -> dict[str, int]:
        # The marker is looked for first, as a reader does.
        names = [MARKER_NAME] if (self.path / MARKER_NAME).exists() else []
        names += [str(path.relative_to(self.path)) for path in self.path.rglob("*") if path.is_file()]
        return {name: (self.path / name).stat().st_size for name in names if not _is_temporary(name)}

    def put(self, name: str, content: bytes) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_bytes(content)

    def delete(self, name: str) -> None:
        (self.path / name).unlink()

    def names_by_arrival(self) -> list[str]:
        return sorted(self.read_all(), key=lambda name: (self.path / name).stat().st_mtime_ns)

    def leftovers(self) -> list[str]:
        return [name for name in contents_of(self.path) if _is_temporary(name)]


def _is_temporary(name: str) -> bool:
    return Path(name).name.startswith(".ckptflow-upload-")


@contextmanager
def running_bucket(server: S3Server, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A prefix of its own on the server, with the environment that leads there through a proxy."""
    with running_proxy(server.endpoint_url) as proxy:
        for variable, value in server.environment(proxy.endpoint_url).items():
            monkeypatch.setenv(variable, value)
        client = server.client()
        yield Bucket(uri=f"s3://{name}/{random.randbytes(6).hex()}/step-10", client=client, proxy=proxy)
        client.close()


@pytest.fixture
def bucket(s3_server: S3Server, s3_bucket_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A prefix of its own on the session's server."""
    with running_bucket(s3_server, s3_bucket_name, monkeypatch) as running:
        yield running


@dataclass
class Bucket:
    """A prefix on a real S3 server; uploads go through a proxy that counts, looks go past it."""

    uri: str
    client: S3Client
    proxy: Proxy
    has_commits: bool = False

    @property
    def bucket(self) -> str:
        return urlsplit(self.uri).netloc

    @property
    def prefix(self) -> str:
        return urlsplit(self.uri).path.lstrip("/") + "/"

    def read_all(self) -> dict[str, bytes]:
        return {name: self._read(name) for name in self.sizes()}

    def sizes(self) -> dict[str, int]:
        entries = self.client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix).get("Contents", [])
        return {entry["Key"].removeprefix(self.prefix): entry["Size"] for entry in entries}

    def put(self, name: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=self.prefix + name, Body=content)

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=self.prefix + name)

    def names_by_arrival(self) -> list[str]:
        """By the request that made each object appear."""
        prefix = f"{self.bucket}/{self.prefix}"
        made = [
            each.key.removeprefix(prefix)
            for each in self.proxy.requests
            if (each.method == "PUT" and not each.query) or (each.method == "POST" and "uploadId" in each.query)
        ]
        return list(dict.fromkeys(made))

    def leftovers(self) -> list[str]:
        answer = self.client.list_multipart_uploads(Bucket=self.bucket, Prefix=self.prefix)
        return [upload["Key"] for upload in answer.get("Uploads", [])]

    def complete(self, name: str, upload_id: str) -> None:
        """Make an object of the parts that an open upload has, past the client under test."""
        key = self.prefix + name
        listed = self.client.list_parts(Bucket=self.bucket, Key=key, UploadId=upload_id)["Parts"]
        self.client.complete_multipart_upload(
            Bucket=self.bucket,
            Key=key,
            UploadId=upload_id,
            MultipartUpload={"Parts": [{"PartNumber": part["PartNumber"], "ETag": part["ETag"]} for part in listed]},
        )

    def _read(self, name: str) -> bytes:
        return self.client.get_object(Bucket=self.bucket, Key=self.prefix + name)["Body"].read()


#: What the Hub or the card adds to a repository.
_ADDED = (".gitattributes", "README.md")


@dataclass
class HubRepo:
    """A branch of a repository on the Hub double, seen past its HTTP routes."""

    hub: Hub
    repo_id: str = "tester/model"
    branch: str = "main"
    has_commits: bool = True

    @property
    def uri(self) -> str:
        return f"hf://{self.repo_id}" + ("" if self.branch == "main" else f"@{self.branch}")

    @property
    def repo(self) -> Repo:
        return self.hub.repos[self.repo_id]

    def read_all(self) -> dict[str, bytes]:
        if self.repo_id not in self.hub.repos:
            return {}
        return {name: content for name, content in self.repo.read_all(self.branch).items() if name not in _ADDED}

    def sizes(self) -> dict[str, int]:
        commit = self.repo.commit_of(self.branch) if self.repo_id in self.hub.repos else None
        # Files of a commit that were never sent would have no size.
        return (
            {} if commit is None else {n: len(self.repo.content(e)) for n, e in commit.files.items() if n not in _ADDED}
        )

    def put(self, name: str, content: bytes) -> None:
        if self.repo_id not in self.hub.repos:
            self.hub.create(self.repo_id, private=True)
        self.repo.branches.setdefault(self.branch, self.repo.branches["main"].history()[-1])
        self.repo.put(name, content, self.branch)

    def delete(self, name: str) -> None:
        self.repo.commit(self.branch, f"delete {name}", "", {name: None})

    def names_by_arrival(self) -> list[str]:
        """By commit, and in the order in which the commit names them."""
        return [name for names in self.repo.order for name in names if name not in _ADDED]

    def leftovers(self) -> list[str]:
        return self.repo.missing_objects()


def outcomes(record: PublishRecord) -> dict[str, str]:
    """What became of each file, by name."""
    return {file.name: file.outcome for file in record.files}
