"""buildah and podman with a storage of their own, and pip's settings of this machine for what is built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("buildah", "podman", "runc", "unshare", "ip")
# What pip's settings say about where packages come from; the rest of them is this machine's own business.
PIP_SOURCES = ("index-url", "extra-index-url", "find-links", "trusted-host", "proxy", "cert")
# A machine that may not raise limits can't give podman's own, higher ones.
LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096")


class CheckError(Exception):
    """What was found, for the person at the terminal."""


@dataclass(frozen=True, slots=True)
class Tools:
    """Where images and containers are kept, and by which storage driver."""

    work_dir: Path
    driver: str = "overlay"

    @property
    def _storage(self) -> list[str]:
        # With one database each, which names its driver and its place.
        places = {"--root": f"storage-{self.driver}", "--runroot": f"run-{self.driver}"}
        words = [word for option, name in places.items() for word in (option, str(self.work_dir / name))]
        return [*words, "--storage-driver", self.driver]

    def buildah(self, *args: str) -> list[str]:
        """A command line."""
        return ["buildah", *self._storage, *args]

    def podman(self, *args: str) -> list[str]:
        """A command line; runc, since crun refuses some mixes of control groups."""
        networks = ["--network-config-dir", str(self.work_dir / "networks")]
        return ["podman", *self._storage, *networks, "--runtime", "runc", "--cgroup-manager", "cgroupfs", *args]


def run(command: list[str], *, log: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; its output is kept, in ``log`` if one is named.

    Raises:
        CheckError: it failed, and ``check`` is set.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if log is not None:
        log.write_text(done.stdout)
    if check and done.returncode != 0:
        last = "\n".join(done.stdout.splitlines()[-25:])
        raise CheckError(f"exit status {done.returncode}: {' '.join(command)}\n{last}")
    return done


def require_tools() -> None:
    """Raise CheckError where this can't be done here, with what is missing."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        raise CheckError(f"not installed: {' '.join(missing)}; on Debian: apt-get install buildah podman runc iproute2")
    if os.geteuid() != 0:
        raise CheckError("root is needed: for network namespaces, and for files of the image's own user")


def tools_for(work_dir: Path) -> Tools:
    """With overlay where the file system can do it, else with vfs, which copies each layer whole."""
    tools = Tools(work_dir)
    done = run(tools.buildah("from", "scratch"), check=False)
    container = done.stdout.split()[-1] if done.returncode == 0 else ""
    can_mount = bool(container) and run(tools.buildah("mount", container), check=False).returncode == 0
    if container:
        run(tools.buildah("rm", container))
    return tools if can_mount else Tools(work_dir, driver="vfs")


def pip_sources() -> dict[str, list[str]]:
    """Where pip gets packages on this machine: its settings by name, from files and environment."""
    listed = run([sys.executable, "-m", "pip", "config", "list"]).stdout
    sources: dict[str, list[str]] = {}
    for line in listed.splitlines():
        scope_and_name, found, value = line.partition("=")
        name = scope_and_name.rpartition(".")[2]
        if found and name in PIP_SOURCES:
            words = value.strip("'\"").replace("\\n", " ").split()
            sources[name] = list(dict.fromkeys([*sources.get(name, []), *words]))
    return sources


def pip_mounts(tools: Tools, sources: dict[str, list[str]]) -> list[str]:
    """Options that give a build the same, with the directories that they name; nothing of it stays in an image."""
    if not sources:
        return []
    config = tools.work_dir / "pip.conf"
    config.write_text("[global]\n" + "".join(f"{name} = {' '.join(words)}\n" for name, words in sources.items()))
    places = {config: Path("/etc/pip.conf")}
    for word in (word for name in PIP_SOURCES for word in sources.get(name, [])):
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            # Certificates have neighbours, and an index's links lead to the files beside it.
            place = path if word.startswith("/") and path.is_dir() else path.parent
            places[place] = place
    return [word for source, target in places.items() for word in ("--volume", f"{source}:{target}:ro")]
