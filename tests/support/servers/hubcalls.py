"""One exchange with the Hub double: the request with its body, and the answer."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from servers.hub import Hub, HubRequest
    from servers.hubrepo import Repo


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer."""

    status: int = 200
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, document: object, status: int = 200, **headers: str) -> Reply:
        """An answer in JSON."""
        return cls(status=status, content=json.dumps(document).encode(), headers=headers)


class HubError(Exception):
    """An answer that is an error; the code, where there is one, picks the client's exception."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        self.reply = Reply(status=status, content=json.dumps({"error": message}).encode(), headers=headers)
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request with its body, and what its token may do."""

    request: HubRequest
    body: bytes
    role: Literal["read", "write"] | None

    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)

    def check_write(self) -> None:
        """Refuse tokens that may not write."""
        if self.role != "write":
            raise HubError(403 if self.role else 401, "You don't have the rights to write here")


def repo_of(hub: Hub, call: Call, repo_id: str) -> Repo:
    repo = hub.repos.get(repo_id)
    if repo is None or (repo.private and call.role is None):
        raise HubError(404 if call.role else 401, "Repository not found", "RepoNotFound")
    return repo


def nonce() -> str:
    """For signed URLs and scratch files."""
    return secrets.token_hex(8)
