"""A reverse proxy that counts what goes to a real server, and can stand in its way.

It passes the Host header on as it came, so that signatures stay right.
"""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from ckptflow.processes.localservers import TlsFiles
from servers.loopback import serving


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request: ``key`` is the path without the leading slash, ``query`` keeps valueless names."""

    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    length: int

    @property
    def is_content(self) -> bool:
        """Whether it carries content of a file: an object put whole, or a part."""
        return self.method == "PUT" and (not self.query or "partNumber" in self.query)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the proxy answers itself; status 0 drops the connection after half of the body was read."""

    status: int
    code: str = ""
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """In S3's own words."""
        return f"<Error><Code>{self.code}</Code><Message>{self.message}</Message></Error>".encode()


DROP = Answer(status=0)
Interference = Callable[[Request], Answer | None]


@dataclass(slots=True)
class Proxy:
    """A running proxy; set ``interfere`` to stand in the way, read ``requests`` for those that the server has answered.

    ``passed`` are those that were sent on, answered or not.
    """

    endpoint_url: str = ""
    interfere: Interference | None = None
    passed: list[Request] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    refused: list[Request] = field(default_factory=list)

    def contents(self) -> list[tuple[str, str]]:
        """Key and part number ("" for whole objects) of all content that reached the server."""
        return [(each.key, each.query.get("partNumber", "")) for each in self.requests if each.is_content]

    def settle(self) -> None:
        """Wait until the server has answered all that was sent on, for a client that is dead by now too."""
        deadline = time.monotonic() + 30
        while len(self.passed) > len(self.requests):
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.02)


@contextmanager
def running_proxy(server_url: str, tls: TlsFiles | None = None) -> Iterator[Proxy]:
    """A proxy before ``server_url``, on a free port; with TLS on both sides where the server has it."""
    proxy = Proxy()
    handler = type(
        "Handler",
        (_Handler,),
        {
            "proxy": proxy,
            "server_address": urlsplit(server_url).netloc,
            "trust": None if tls is None else ssl.create_default_context(cafile=tls.certificate_path),
        },
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.certificate_path, tls.key_path)
        # The handshake is for the connection's own thread, or one client could hold up all.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    proxy.endpoint_url = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_address[1]}"
    with serving(server):
        yield proxy


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # it would hold each answer back for 40 ms
    proxy: ClassVar[Proxy]
    server_address: ClassVar[str]
    trust: ClassVar[ssl.SSLContext | None]

    def do_any(self) -> None:
        request = self._request()
        answer = None if self.proxy.interfere is None else self.proxy.interfere(request)
        if answer is not None:
            self.proxy.refused.append(request)
            self._answer_self(request, answer)
            return
        body = self.rfile.read(request.length)
        if len(body) < request.length:
            self.close_connection = True
            return
        self.proxy.passed.append(request)
        connection = self._connection()
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection"):
                    connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            content = response.read()
            self.proxy.requests.append(request)
            self._send(response.status, response.getheaders(), content)
        finally:
            connection.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_any  # noqa: N815

    def _connection(self) -> http.client.HTTPConnection:
        if self.trust is None:
            return http.client.HTTPConnection(self.server_address)
        return http.client.HTTPSConnection(self.server_address, context=self.trust)

    def _request(self) -> Request:
        parts = urlsplit(self.path)
        return Request(
            method=self.command,
            key=unquote(parts.path.lstrip("/")),
            query={name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()},
            headers={name.lower(): value for name, value in self.headers.items()},
            length=int(self.headers.get("Content-Length", 0)),
        )

    def _answer_self(self, request: Request, answer: Answer) -> None:
        if answer.status == 0:
            self.rfile.read(request.length // 2)
            self.close_connection = True
            return
        self.rfile.read(request.length)
        body = b"" if request.method == "HEAD" else answer.body()
        self._send(answer.status, [*answer.headers.items(), ("Content-Length", str(len(body)))], body)

    def _send(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        try:
            self.send_response_only(status)
            has_length = False
            for name, value in headers:
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
                    has_length = has_length or name.lower() == "content-length"
            if not has_length:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client was killed

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionResetError, BrokenPipeError, ssl.SSLError):
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""
