"""What a step shows in the Prefect UI: tables, pictures as Mermaid, and progress that moves.

Artifacts are for people: a server that can't store one does not fail the step, it leaves a warning in the log.
Keys allow lower-case letters, digits and dashes only, so the step and run stand in the description.
"""

from __future__ import annotations

import contextvars
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from ckptflow.cli.console import format_bytes

logger = logging.getLogger(__name__)

Cell = str | int | float
UPDATE_SECONDS = 1.0


def table(key: str, description: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table artifact; values that JSON can't hold become text."""
    _create(create_table_artifact, table=plain_rows(rows), key=key, description=description)


def plain_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Cell]]:
    """Rows of which JSON can hold every value, and the UI show it."""
    return [{name: _cell(value) for name, value in row.items()} for row in rows]


def markdown(key: str, description: str, text: str) -> None:
    """A markdown artifact; Mermaid blocks in it are drawn."""
    _create(create_markdown_artifact, markdown=text, key=key, description=description)


def link(key: str, description: str, uri: str) -> None:
    """A link artifact."""
    _create(create_link_artifact, link=uri, link_text=uri, key=key, description=description)


# Mermaid draws on transparent ground, and the UI puts a dark box behind it in its light and its dark theme.
_INK, _GROUND, _BAR = "#e5e7eb", "#1e293b", "#38bdf8"
_SLICES = ("#38bdf8", "#a78bfa", "#34d399", "#fbbf24", "#f87171")


def pie(title: str, parts: Mapping[str, int]) -> str:
    """A Mermaid pie of bytes."""
    colors = {f"pie{number}": color for number, color in enumerate(_SLICES, start=1)}
    texts = dict.fromkeys(("pieTitleTextColor", "pieLegendTextColor"), _INK)
    slices = [f'    "{name}, {format_bytes(size)}" : {size}' for name, size in parts.items() if size > 0]
    return _mermaid({**colors, **texts, "pieSectionTextColor": _GROUND}, [f"pie title {title}", *slices])


def bars(title: str, labels: Sequence[str], values: Sequence[float], axis: str) -> str:
    """A Mermaid bar chart; labels along x, of which about ten have room; ``axis`` names what y counts."""
    parts = ("titleColor", "xAxisLabelColor", "xAxisTickColor", "xAxisLineColor", "yAxisLabelColor", "yAxisTitleColor")
    colors = dict.fromkeys((*parts, "yAxisTickColor", "yAxisLineColor"), _INK)
    chart = {**colors, "backgroundColor": _GROUND, "plotColorPalette": _BAR}
    lines = [
        "xychart-beta",
        f'    title "{title}"',
        "    x-axis [" + ", ".join(f'"{label}"' for label in labels) + "]",
        f'    y-axis "{axis}" 0 --> {max(values, default=0.0) or 1.0:g}',
        "    bar [" + ", ".join(f"{value:g}" for value in values) + "]",
    ]
    return _mermaid({"xyChart": chart}, lines)


def _mermaid(variables: Mapping[str, object], lines: Sequence[str]) -> str:
    settings = json.dumps({"theme": "base", "themeVariables": variables})
    return "\n".join(("```mermaid", f"%%{{init: {settings}}}%%", *lines, "```"))


class ByteProgress:
    """A progress artifact that counts bytes: called with the bytes done since the last call, by one thread at a time.

    Shown at most once a second, since each time is a request that takes tens of milliseconds; what takes less than a
    second is not shown at all.
    """

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what, self._total = what, max(total_bytes, 1)
        self._done = 0
        self._started = self._shown = time.monotonic()
        # The library calls back from threads of its own, which know nothing of the run and its server.
        self._context = contextvars.copy_context()
        self._artifact: UUID | None = None
        self._is_away = False

    def __call__(self, count: int) -> None:
        """Count ``count`` more bytes."""
        self._done += count
        if time.monotonic() - self._shown >= UPDATE_SECONDS:
            self._show()

    def finish(self) -> None:
        """Show the last figures, where any were shown."""
        if self._artifact is not None:
            self._show()

    def _show(self) -> None:
        if self._is_away:
            return
        show = create_progress_artifact if self._artifact is None else update_progress_artifact
        known = {} if self._artifact is None else {"artifact_id": self._artifact}
        percent = min(100.0, 100.0 * self._done / self._total)
        figures = {"progress": percent, "description": self._text()}
        self._artifact = self._context.copy().run(_create, show, **known, **figures)
        self._is_away = self._artifact is None  # work must not wait for that server again
        self._shown = time.monotonic()

    def _text(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-6)
        rate = self._done / seconds
        if self._done >= self._total:
            return f"{self._what}: {format_bytes(self._done)} at {format_bytes(rate)}/s"
        left = f" at {format_bytes(rate)}/s, {(self._total - self._done) / rate:.0f} s left" if self._done else ""
        return f"{self._what}: {format_bytes(self._done)} of {format_bytes(self._total)}{left}"


class _Server:
    """Whether the server took the last artifact; where it did not, the next one is tried once, and not for a minute."""

    is_away = False


def _create(create: Callable[..., Any], **arguments: Any) -> Any:
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0} if _Server.is_away else {}):
            made = create(**arguments)
    except (PrefectException, httpx.HTTPError, OSError) as error:
        logger.warning("could not show an artifact in the UI: %s", error)
        _Server.is_away = True
        return None
    _Server.is_away = False
    return made


def _cell(value: object) -> Cell:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # the UI can't show a table that holds Infinity
    return value if isinstance(value, (str, int, float)) else "" if value is None else str(value)
