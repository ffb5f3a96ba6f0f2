"""Dependencies point one way: flows use tasks, tasks use the library, and the library knows nothing of Prefect."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "src" / "ckptflow"
TASKS = ROOT / "tasks" / "ckptflow_tasks"
FLOWS = ROOT / "flows" / "ckptflow_flows"

# Not in any process that only needs numbers and files: the CPU engine runs on numpy.
NEVER_BY_IMPORT = ("prefect", "torch", "transformers")
# Each of these costs a tenth of a second to several seconds: `ckptflow inspect` must answer before that.
NEVER_AT_START = (*NEVER_BY_IMPORT, "boto3", "matplotlib", "rich", "safetensors")

IMPORT_ALL_MODULES = f"""
import importlib, pkgutil, sys
import ckptflow
names = [m.name for m in pkgutil.walk_packages(ckptflow.__path__, "ckptflow.") if not m.name.endswith(".__main__")]
for name in names:
    importlib.import_module(name)
    heavy = [top for top in {NEVER_BY_IMPORT!r} if top in sys.modules]
    if heavy:
        sys.exit(f"importing {{name}} imports {{heavy}}")
print(len(names))
"""

BUILD_PARSER = f"""
import sys
from ckptflow.cli.main import build_parser
build_parser()
print([top for top in {NEVER_AT_START!r} if top in sys.modules])
"""


def modules_below(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.py"))


def imported_names(path: Path) -> Iterator[tuple[str, int]]:
    """Dotted names that a module imports anywhere in its text, also inside functions, with their lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno


def imports_of(directory: Path, *packages: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules_below(directory)
        for name, line in imported_names(path)
        if name.partition(".")[0] in packages
    ]


def test_the_library_never_imports_prefect() -> None:
    assert len(modules_below(LIBRARY)) > 10
    assert imports_of(LIBRARY, "prefect") == []


def test_only_the_command_line_reaches_up_to_the_flows() -> None:
    assert imports_of(LIBRARY, "ckptflow_tasks") == []
    reaching_up = imports_of(LIBRARY, "ckptflow_flows")
    assert [line for line in reaching_up if not line.startswith("src/ckptflow/cli/")] == []


def test_tasks_do_not_know_the_flows() -> None:
    assert imports_of(TASKS, "ckptflow_flows") == []


def test_no_module_of_the_library_imports_a_framework_when_it_is_imported() -> None:
    assert int(output_of(IMPORT_ALL_MODULES)) > 10


def test_the_command_line_starts_without_anything_slow() -> None:
    assert output_of(BUILD_PARSER).strip() == "[]"


def output_of(program: str) -> str:
    """What the program prints in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("keyword", "value"), [("weights_only", False), ("trust_remote_code", True)])
def test_no_call_allows_a_checkpoint_to_run_code(keyword: str, value: bool) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.value.lineno}"
        for directory in (LIBRARY, TASKS, FLOWS)
        for path in modules_below(directory)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        if isinstance(node, ast.keyword)
        and node.arg == keyword
        and isinstance(node.value, ast.Constant)
        and node.value.value is value
    ]
    assert found == []
