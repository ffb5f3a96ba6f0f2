"""Writes base.txt and dev.txt: the versions in this environment of all that ckptflow[all] and dev.in need.

Run by `make lock`. The same environment gives the same files; a package that nothing asks for is named on stderr
and not pinned.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HERE = Path(__file__).resolve().parent
HEADER = "# Made by `make lock`; change pyproject.toml or dev.in instead.\n"
TOOLS = {"pip", "setuptools", "wheel", "ckptflow"}


def runtime_requirements() -> list[Requirement]:
    """What pyproject.toml names, with the extras that ``all`` stands for."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    lines = [*project["dependencies"], *(line for name in sorted(everything.extras) for line in extras[name])]
    return list(map(Requirement, lines))


def development_requirements() -> list[Requirement]:
    """What dev.in names."""
    lines = (line.partition("#")[0].strip() for line in (HERE / "dev.in").read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def closure(roots: Iterable[Requirement]) -> dict[str, str]:
    """Canonical name → installed version of the roots and of all that they need on this platform."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    queue = list(roots)
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        try:
            installed = distribution(requirement.name)
        except PackageNotFoundError:
            raise SystemExit(f"{requirement} is not installed here: run `pip install '{requirement}'` first") from None
        # The local part (+cpu) names one builder's wheel; the public version is what others can install.
        versions[name] = Version(installed.version).public
        for extra in {"", *requirement.extras} - {extra for known, extra in seen if known == name}:
            seen.add((name, extra))
            needs = map(Requirement, installed.requires or ())
            queue += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    return versions


def write_pins(path: Path, versions: dict[str, str], first_line: str = "") -> None:
    """One ``name==version`` a line, sorted."""
    path.write_text(HEADER + first_line + "".join(f"{name}=={versions[name]}\n" for name in sorted(versions)))


def main() -> None:
    """Write both files."""
    base = closure(runtime_requirements())
    both = closure([*runtime_requirements(), *development_requirements()])
    write_pins(HERE / "base.txt", base)
    write_pins(HERE / "dev.txt", {n: v for n, v in both.items() if n not in base}, first_line="-r base.txt\n")
    unasked = {canonicalize_name(found.metadata["Name"]) for found in distributions()} - both.keys() - TOOLS
    print(f"{len(base)} packages in base.txt, {len(both) - len(base)} more in dev.txt")
    if unasked:
        print(f"installed, but nothing asks for: {' '.join(sorted(unasked))}", file=sys.stderr)


if __name__ == "__main__":
    main()
