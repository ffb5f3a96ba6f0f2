"""README.md and docs/: their commands, tables, code spans and links, and the texts of the code that they quote."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT / "src", ROOT / "tasks", ROOT / "flows")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# With one backtick, or with three where the text holds some.
SPAN = re.compile(r"```` (.+?) ````|``` (.+?) ```|`([^`\n]+)`")
SEPARATORS = frozenset({";", "&&", "||", "|", "&"})
ASSIGNMENT = re.compile(r"^[A-Z][A-Z0-9_]*=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of a page.

    Attributes:
        page: the file.
        line: its number there.
        words: the command and its arguments, without ``sudo`` and without assignments in front.
        shown: the lines of output that the page shows below it.
    """

    page: Path
    line: int
    words: tuple[str, ...]
    shown: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.text}"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> list[Command]:
    """All commands of the blocks marked ``bash`` or ``console``, in order."""
    return list(_commands(page))


def _commands(page: Path) -> Iterator[Command]:
    text = page.read_text("utf-8")
    for fence in FENCE.finditer(text):
        if fence[1] not in ("bash", "console", "sh", "shell"):
            continue
        first = text.count("\n", 0, fence.start(2)) + 1
        for line, typed, shown in _typed(fence[2], first, has_prompt=fence[1] == "console"):
            simple = list(_simple(typed))
            for words in simple[:-1]:
                yield Command(page=page, line=line, words=words)
            if simple:
                yield Command(page=page, line=line, words=simple[-1], shown=shown)


def _typed(block: str, first: int, *, has_prompt: bool) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Line number, what is typed, and the output below it; lines that end in a backslash are joined."""
    entries: list[tuple[int, str, list[str]]] = []
    goes_on = False
    for number, line in enumerate(block.splitlines(), first):
        if goes_on:
            at, typed, shown = entries[-1]
            entries[-1] = (at, typed + line.removesuffix("\\"), shown)
        elif not has_prompt or line.startswith("$ "):
            entries.append((number, line.removeprefix("$ ").removesuffix("\\"), []))
        elif entries:
            entries[-1][2].append(line)
        else:
            raise AssertionError(f"output without a command: {line}")
        goes_on = line.endswith("\\") and (goes_on or not has_prompt or line.startswith("$ "))
    for at, typed, shown in entries:
        yield at, typed, tuple(shown)


def _simple(typed: str) -> Iterator[tuple[str, ...]]:
    """The simple commands of one line."""
    lexer = shlex.shlex(typed, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in SEPARATORS:
            words.append(word)
            continue
        while words and (words[0] == "sudo" or (ASSIGNMENT.match(words[0]) and len(words) > 1)):
            words.pop(0)
        if words:
            yield tuple(words)
        words = []


def prose(page: Path) -> str:
    """The page without its blocks."""
    return FENCE.sub("", page.read_text("utf-8"))


def spans(text: str) -> list[str]:
    """What stands between backticks."""
    return [next(group for group in match.groups() if group) for match in SPAN.finditer(text)]


def tables(text: str) -> Iterator[list[list[str]]]:
    """Each table as rows of cells, the head first."""
    for block in re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE):
        rows = [
            [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line[1:-1])]
            for line in block.splitlines()
        ]
        yield [row for number, row in enumerate(rows) if number != 1]


def section(page: Path, title: str) -> str:
    """The text below a heading, up to the next heading of its level or above."""
    text = page.read_text("utf-8")
    found = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert found, f"{page.name} has no section {title!r}"
    rest = text[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@dataclass(frozen=True, slots=True)
class Texts:
    """All literal texts of the code: plain ones, and f-strings as patterns."""

    plain: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...]

    def holds(self, message: str) -> bool:
        """Whether the code can say this: a part of a plain text, or an f-string filled in."""
        return any(message in text for text in self.plain) or any(p.match(message) for p in self.patterns)


@cache
def texts_of_the_code() -> Texts:
    plain: set[str] = set()
    patterns: set[str] = set()
    for path in (path for root in SOURCES for path in root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                plain.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
                if sum(len(str(part)) for part in parts if part is not None) >= 12:
                    patterns.add("".join(".+?" if part is None else re.escape(str(part)) for part in parts) + "$")
    return Texts(tuple(plain), tuple(re.compile(pattern) for pattern in patterns))


@cache
def tests_in(name: str) -> frozenset[str]:
    """Names of the test functions and methods of a file in tests/."""
    path = ROOT / "tests" / name
    if not path.is_file():
        return frozenset()
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def is_test(reference: str) -> bool:
    """Whether ``test_x.py::test_y`` is there."""
    name, _, function = reference.removeprefix("tests/").partition("::")
    return function in tests_in(name)
