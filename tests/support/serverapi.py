"""Requests to the API of a Prefect server."""

from __future__ import annotations

import http
import json
import time
import urllib.error
import urllib.request
from typing import Any

TRIES = 30


def ask_server(api_url: str, path: str, body: object | None = None) -> Any:
    """POST where there is a body, else GET; again while the server is too busy, as Prefect's client does."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{api_url}/{path}", data=data, headers={"Content-Type": "application/json"})
    for _ in range(TRIES):
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                content = response.read()
            return json.loads(content) if content else None
        except urllib.error.HTTPError as error:
            if error.code != http.HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            error.close()
            time.sleep(1)
    raise AssertionError(f"the server stays too busy for {path}")
