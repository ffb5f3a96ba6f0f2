"""A protocol double of the Hugging Face Hub: it speaks the Hub's write API to the real client, over loopback.

The service itself can't be had in a test. What is here was seen on the wire between it and huggingface_hub; where
git-lfs is installed, a test drives the LFS routes with it as well.
"""

from __future__ import annotations

import base64
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import parse_qs, unquote, urlsplit

from servers.hubcalls import Call, HubError, Reply
from servers.hubrepo import Repo
from servers.hubroutes import ROUTES
from servers.loopback import serving

TOKEN = "hf_testTokenThatMustNotBeSeen0001"
READ_TOKEN = "hf_testTokenThatMayOnlyRead000002"
USER = "tester"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRequest:
    """One request; ``path`` is unquoted."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong with a request.

    Attributes:
        status: answer of the double itself, with ``body`` and ``headers``; 0 lets the request through.
        drop: the connection breaks ``before`` the request has an effect, or ``after`` it, so that only the answer is
            lost, or ``half``-way through the body.
        delay_seconds: wait before anything else.
    """

    status: int = 0
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    drop: Literal["before", "after", "half"] | None = None
    delay_seconds: float = 0.0


Interference = Callable[[HubRequest], Fault | None]


@dataclass(slots=True)
class Hub:
    """A running double; set ``interfere`` to stand in the way, read ``requests`` for what came."""

    directory: Path
    endpoint: str = ""
    interfere: Interference | None = None
    chunk_bytes: int = 8 << 20  # larger LFS objects come in parts
    page_size: int = 1000
    repos: dict[str, Repo] = field(default_factory=dict)
    tokens: dict[str, Literal["read", "write"]] = field(default_factory=lambda: {TOKEN: "write", READ_TOKEN: "read"})
    requests: list[HubRequest] = field(default_factory=list)
    parts: dict[tuple[str, int], bytes] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def create(self, repo_id: str, *, private: bool) -> Repo:
        """A new repository, with the first commit that the Hub itself makes."""
        with self.lock:
            self.repos[repo_id] = Repo(directory=self.directory / repo_id, private=private)
            return self.repos[repo_id]

    def seen(self, method: str, pattern: str) -> list[HubRequest]:
        """Requests that came with this method and a path that matches."""
        return [each for each in self.requests if each.method == method and re.search(pattern, each.path)]

    def environment(self) -> dict[str, str]:
        """What the client reads, and nothing of this machine's own."""
        return {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(self.directory / "home")}


@contextmanager
def running_hub(directory: Path) -> Iterator[Hub]:
    """A double on a free port."""
    hub = Hub(directory=directory)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    with serving(server):
        yield hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # it would hold each answer back for 40 ms
    hub: ClassVar[Hub]

    def do_any(self) -> None:
        request = self._request()
        self.hub.requests.append(request)
        fault = (self.hub.interfere(request) if self.hub.interfere else None) or Fault()
        time.sleep(fault.delay_seconds)
        if fault.drop in ("before", "half"):
            self.rfile.read(request.length // 2 if fault.drop == "half" else request.length)
            self.close_connection = True
            return
        body = self._body(request)
        if body is None:
            self.close_connection = True
            return
        if fault.status:
            self._send(Reply(status=fault.status, content=fault.body.encode(), headers=fault.headers))
            return
        reply = self._answer(request, body)
        if fault.drop == "after":
            self.close_connection = True
            return
        self._send(reply)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_any  # noqa: N815

    def _request(self) -> HubRequest:
        parts = urlsplit(self.path)
        return HubRequest(
            method=self.command,
            path=unquote(parts.path),
            query={name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()},
            headers={name.lower(): value for name, value in self.headers.items()},
            length=int(self.headers.get("Content-Length", 0)),
        )

    def _body(self, request: HubRequest) -> bytes | None:
        """The body; None where the client went away."""
        if request.headers.get("transfer-encoding") != "chunked":
            body = self.rfile.read(request.length)
            return body if len(body) == request.length else None
        chunks = []
        while size := int(self.rfile.readline() or b"0", 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _answer(self, request: HubRequest, body: bytes) -> Reply:
        try:
            for method, pattern, route in ROUTES:
                # Matched before unquoting: a revision may hold a quoted slash.
                match = re.fullmatch(pattern, urlsplit(self.path).path)
                if match and request.method == method:
                    values = {name: unquote(value) for name, value in match.groupdict(default="").items()}
                    return route(self.hub, Call(request=request, body=body, role=self._role(request)), **values)
        except HubError as error:
            return error.reply
        return Reply.of({"error": f"no route for {request.method} {request.path}"}, status=404)

    def _role(self, request: HubRequest) -> Literal["read", "write"] | None:
        kind, _, value = request.headers.get("authorization", "").partition(" ")
        if kind == "Basic":  # git-lfs
            value = base64.b64decode(value).decode().partition(":")[2]
        if value and value not in self.hub.tokens:
            raise HubError(401, "Invalid credentials in Authorization header")
        return self.hub.tokens.get(value)

    def _send(self, reply: Reply) -> None:
        try:
            self.send_response_only(reply.status)
            for name, value in {"Content-Type": "application/json", **reply.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply.content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(reply.content)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionResetError, BrokenPipeError):
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""
