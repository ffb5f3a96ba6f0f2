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
    """POST where there is a body, else GET."""
    data = None if body is None else json.dumps(body).encode()
    return _send(urllib.request.Request(f"{api_url}/{path}", data=data, headers={"Content-Type": "application/json"}))


def ask_for_events(api_url: str, name: str) -> list[dict[str, Any]]:
    """All events of that name, page by page."""
    query = {"filter": {"event": {"name": [name]}, "occurred": {"since": "2000-01-01T00:00:00Z"}}, "limit": 50}
    page = ask_server(api_url, "events/filter", query)
    found = list(page["events"])
    while page.get("next_page"):
        page = _send(urllib.request.Request(page["next_page"]))
        found += page["events"]
    return found


def delete_from_server(api_url: str, path: str) -> None:
    """DELETE."""
    _send(urllib.request.Request(f"{api_url}/{path}", method="DELETE"))


def _send(request: urllib.request.Request) -> Any:
    """The answer; asked again while the server is too busy, as Prefect's client does."""
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
    raise AssertionError(f"the server stays too busy for {request.full_url}")
