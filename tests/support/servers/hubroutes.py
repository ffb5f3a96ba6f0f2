"""The routes of the Hub double: what the real client asks, and what the Hub answers."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import yaml

from servers import hublfs
from servers.hubcalls import Call, HubError, Reply, nonce, repo_of
from servers.hubrepo import Entry, Repo

if TYPE_CHECKING:
    from servers.hub import Hub

_KNOWN_LICENSES = ("apache-2.0", "mit", "llama3.1", "other")


def _commit(repo: Repo, revision: str) -> Any:
    commit = repo.commit_of(revision)
    if commit is None:
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    return commit


def _create(hub: Hub, call: Call) -> Reply:
    call.check_write()
    wish = call.json()
    repo_id = f"{wish.get('organization') or 'tester'}/{wish['name']}"
    with hub.lock:
        url = f"{hub.endpoint}/{repo_id}"
        if repo_id in hub.repos:
            return Reply.of({"error": "You already created this model repo", "url": url}, status=409)
        is_private = wish.get("visibility", "public") == "private" or wish.get("private") is True
        hub.create(repo_id, private=is_private)
        return Reply.of({"url": url, "name": repo_id, "id": nonce()})


def _validate_yaml(hub: Hub, call: Call) -> Reply:
    match = re.match(r"---\n(.*?)\n---", call.json()["content"], re.DOTALL)
    card = yaml.safe_load(match[1]) if match else {}
    errors = []
    if card.get("license", "mit") not in _KNOWN_LICENSES:
        errors.append({"message": f'"license" must be one of {", ".join(_KNOWN_LICENSES)}'})
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(card.get("base_model", "a/b"))):
        errors.append({"message": '"base_model" is not valid. Use a model id from https://hf.co/models.'})
    return Reply.of({"errors": errors, "warnings": []}, status=400 if errors else 200)


def _info(hub: Hub, call: Call, repo_id: str, revision: str = "") -> Reply:
    repo = repo_of(hub, call, repo_id)
    commit = _commit(repo, revision or "main")
    siblings = [{"rfilename": path} for path in sorted(commit.files)]
    facts = {"id": repo_id, "sha": commit.oid, "private": repo.private, "tags": [], "siblings": siblings}
    return Reply.of(facts)


def _auth_check(hub: Hub, call: Call, repo_id: str) -> Reply:
    repo_of(hub, call, repo_id)
    call.check_write()
    return Reply()


def _whoami(hub: Hub, call: Call) -> Reply:
    if call.role is None:
        raise HubError(401, "Invalid username or password.")
    return Reply.of(
        {"type": "user", "name": "tester", "auth": {"type": "access_token", "accessToken": {"role": call.role}}}
    )


def _refs(hub: Hub, call: Call, repo_id: str) -> Reply:
    repo = repo_of(hub, call, repo_id)

    def listed(refs: Mapping[str, Any], kind: str) -> list[dict[str, str]]:
        return [
            {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": commit.oid} for name, commit in refs.items()
        ]

    return Reply.of({"branches": listed(repo.branches, "heads"), "tags": listed(repo.tags, "tags"), "converts": []})


def _commits(hub: Hub, call: Call, repo_id: str, revision: str) -> Reply:
    commits = _commit(repo_of(hub, call, repo_id), revision).history()
    listed = [
        {"id": c.oid, "title": c.title, "message": c.message, "date": "2026-01-01T00:00:00.000Z", "authors": []}
        for c in commits
    ]
    return _page(hub, call, listed)


def _tree(hub: Hub, call: Call, repo_id: str, revision: str) -> Reply:
    files = _commit(repo_of(hub, call, repo_id), revision).files
    folders = {path.rpartition("/")[0] for path in files if "/" in path}
    listed = [{"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in sorted(folders)]
    return _page(hub, call, listed + [entry.to_json(path) for path, entry in sorted(files.items())])


def _page(hub: Hub, call: Call, items: list[Any]) -> Reply:
    start = int(call.request.query.get("cursor", 0))
    end = start + hub.page_size
    more = f"{hub.endpoint}{call.request.path.replace(' ', '%20')}?cursor={end}"
    headers = {"Link": f'<{more}>; rel="next"'} if end < len(items) else {}
    return Reply.of(items[start:end], **headers)


def _resolve(hub: Hub, call: Call, repo_id: str, revision: str, path: str) -> Reply:
    repo = repo_of(hub, call, repo_id)
    commit = _commit(repo, revision)
    entry = commit.files.get(path)
    if entry is None:
        raise HubError(404, "Entry not found", "EntryNotFound")
    content = repo.content(entry)
    headers = {"ETag": f'"{entry.sha256 or entry.oid}"', "X-Repo-Commit": commit.oid}
    wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", call.request.headers.get("range", ""))
    if not wanted:
        return Reply(content=content, headers=headers)
    first, last = int(wanted[1]), min(int(wanted[2]), len(content) - 1)
    headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
    return Reply(status=206, content=content[first : last + 1], headers=headers)


def _preupload(hub: Hub, call: Call, repo_id: str, revision: str) -> Reply:
    call.check_write()
    repo = repo_of(hub, call, repo_id)
    files = _commit(repo, revision).files
    answers = []
    for each in call.json()["files"]:
        there = files.get(each["path"])
        oid = there and (there.sha256 or there.oid)
        mode = "lfs" if repo.is_lfs(each["path"], each["size"]) else "regular"
        answers.append({"path": each["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return Reply.of({"files": answers})


def _make_commit(hub: Hub, call: Call, repo_id: str, revision: str) -> Reply:
    call.check_write()
    repo = repo_of(hub, call, repo_id)
    lines = [json.loads(line) for line in call.body.splitlines()]
    header = next(line["value"] for line in lines if line["key"] == "header")
    with repo.lock:
        if revision not in repo.branches:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        if header.get("parentCommit", repo.branches[revision].oid) != repo.branches[revision].oid:
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        changes = {line["value"]["path"]: _change(repo, line) for line in lines if line["key"] != "header"}
        commit = repo.commit(revision, header["summary"], header["description"], changes)
    url = f"{hub.endpoint}/{repo_id}/commit/{commit.oid}"
    return Reply.of({"success": True, "commitOid": commit.oid, "commitUrl": url, "hookOutput": ""})


def _change(repo: Repo, line: Mapping[str, Any]) -> Entry | None:
    key, value = line["key"], line["value"]
    if key == "deletedFile":
        return None
    if key == "file":
        return repo.add_blob(base64.b64decode(value["content"]))
    path = repo.lfs_path(value["oid"])
    if key != "lfsFile" or not path.is_file() or path.stat().st_size != value["size"]:
        raise HubError(400, f"LFS pointer pointed to a file that does not exist: {value}")
    return repo.lfs_entry(value["oid"], value["size"])


def _make_branch(hub: Hub, call: Call, repo_id: str, name: str) -> Reply:
    call.check_write()
    repo = repo_of(hub, call, repo_id)
    with repo.lock:
        if name in repo.branches:
            raise HubError(409, "Reference already exists")
        repo.branches[name] = _commit(repo, call.json().get("startingPoint") or "main")
    return Reply()


def _make_tag(hub: Hub, call: Call, repo_id: str, revision: str) -> Reply:
    call.check_write()
    repo = repo_of(hub, call, repo_id)
    name = call.json()["tag"]
    with repo.lock:
        if name in repo.tags:
            raise HubError(409, "Tag reference exists already")
        repo.tags[name] = _commit(repo, revision)
    return Reply()


_REPO = r"(?P<repo_id>[^/]+/[^/]+)"
_REV = r"(?P<revision>[^/]+)"
_OID = r"(?P<oid>[0-9a-f]{64})"
ROUTES: list[tuple[str, str, Callable[..., Reply]]] = [
    ("POST", "/api/repos/create", _create),
    ("POST", "/api/validate-yaml", _validate_yaml),
    ("GET", f"/api/models/{_REPO}", _info),
    ("GET", f"/api/models/{_REPO}/revision/{_REV}", _info),
    ("GET", "/api/whoami-v2", _whoami),
    ("GET", f"/api/models/{_REPO}/auth-check/write", _auth_check),
    ("GET", f"/api/models/{_REPO}/refs", _refs),
    ("GET", f"/api/models/{_REPO}/commits/{_REV}", _commits),
    ("GET", f"/api/models/{_REPO}/tree/{_REV}", _tree),
    ("POST", f"/api/models/{_REPO}/preupload/{_REV}", _preupload),
    ("POST", f"/api/models/{_REPO}/commit/{_REV}", _make_commit),
    ("POST", f"/api/models/{_REPO}/branch/(?P<name>[^/]+)", _make_branch),
    ("POST", f"/api/models/{_REPO}/tag/{_REV}", _make_tag),
    ("POST", f"/{_REPO}.git/info/lfs/objects/batch", hublfs.lfs_batch),
    ("POST", f"/{_REPO}.git/info/lfs/verify", hublfs.lfs_verify),
    ("PUT", f"/lfs/{_REPO}/{_OID}", hublfs.lfs_put),
    ("GET", f"/lfs/{_REPO}/{_OID}", hublfs.lfs_get),
    ("POST", f"/lfs/{_REPO}/{_OID}/complete", hublfs.lfs_complete),
    ("GET", f"/{_REPO}/resolve/{_REV}/(?P<path>.+)", _resolve),
    ("HEAD", f"/{_REPO}/resolve/{_REV}/(?P<path>.+)", _resolve),
]
