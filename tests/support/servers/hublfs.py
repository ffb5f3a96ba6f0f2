"""The Git LFS routes of the Hub double: https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from servers.hubcalls import Call, HubError, Reply, nonce, repo_of
from servers.hubrepo import Repo

if TYPE_CHECKING:
    from servers.hub import Hub


def lfs_batch(hub: Hub, call: Call, repo_id: str) -> Reply:
    repo = repo_of(hub, call, repo_id)
    wish = call.json()
    if wish["operation"] == "upload":
        call.check_write()
    is_multipart = "multipart" in wish.get("transfers", [])
    objects = [_lfs_object(hub, repo, repo_id, wish["operation"], each, is_multipart) for each in wish["objects"]]
    return Reply.of({"transfer": "multipart" if is_multipart else "basic", "objects": objects})


def _lfs_object(
    hub: Hub, repo: Repo, repo_id: str, operation: str, wanted: Mapping[str, Any], is_multipart: bool
) -> dict[str, Any]:
    oid, size = wanted["oid"], wanted["size"]
    is_there = repo.lfs_path(oid).is_file()
    url = f"{hub.endpoint}/lfs/{repo_id}/{oid}"
    if operation == "download":
        return {"oid": oid, "size": size, "actions": {"download": {"href": f"{url}?sig={nonce()}"}}}
    if is_there:
        return {"oid": oid, "size": size}
    upload: dict[str, Any] = {"href": f"{url}?sig={nonce()}"}
    if is_multipart and size > hub.chunk_bytes:
        count = -(-size // hub.chunk_bytes)
        upload_id = nonce()
        parts = {f"{n:05}": f"{url}?part={n}&upload={upload_id}" for n in range(1, count + 1)}
        upload = {"href": f"{url}/complete?upload={upload_id}", "header": {"chunk_size": str(hub.chunk_bytes), **parts}}
    verify = {"href": f"{hub.endpoint}/{repo_id}.git/info/lfs/verify"}
    return {"oid": oid, "size": size, "actions": {"upload": upload, "verify": verify}}


def lfs_put(hub: Hub, call: Call, repo_id: str, oid: str) -> Reply:
    repo = hub.repos[repo_id]
    with hub.lock:
        repo.received_bytes[oid] += len(call.body)
    if number := call.request.query.get("part"):
        hub.parts[call.request.query["upload"], int(number)] = call.body
        etag = hashlib.md5(call.body, usedforsecurity=False).hexdigest()
        return Reply(headers={"ETag": f'"{etag}"'})
    _store(repo, oid, call.body)
    return Reply(headers={"ETag": f'"{oid}"'})


def lfs_complete(hub: Hub, call: Call, repo_id: str, oid: str) -> Reply:
    numbers = [part["partNumber"] for part in call.json()["parts"]]
    upload_id = call.request.query["upload"]
    _store(hub.repos[repo_id], oid, b"".join(hub.parts[upload_id, number] for number in numbers))
    return Reply()


def _store(repo: Repo, oid: str, content: bytes) -> None:
    if hashlib.sha256(content).hexdigest() != oid:
        raise HubError(400, "The content's sha256 is not the object's id")
    scratch = repo.lfs_path(f"{oid}.{nonce()}")
    scratch.write_bytes(content)
    with repo.lock:
        scratch.rename(repo.lfs_path(oid))
        repo.stored[oid] += 1


def lfs_get(hub: Hub, call: Call, repo_id: str, oid: str) -> Reply:
    return Reply(content=hub.repos[repo_id].lfs_path(oid).read_bytes())


def lfs_verify(hub: Hub, call: Call, repo_id: str) -> Reply:
    wish = call.json()
    path = hub.repos[repo_id].lfs_path(wish["oid"])
    if not path.is_file() or path.stat().st_size != wish["size"]:
        raise HubError(404, "No such object")
    return Reply()
