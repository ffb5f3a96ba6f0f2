"""The services of compose.yaml as podman containers, in the order and with the health checks that it says."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools import LIMITS, ROOT, CheckError, Tools, run

COMPOSE = ROOT / "docker" / "compose.yaml"
SUBNET, NETWORK = "10.89.7", "ckptflow-check"
HEALTHY_SECONDS, SETUP_SECONDS = 900.0, 600.0
# Between two looks; the file's own intervals are for a machine that runs for months.
LOOK_SECONDS = 2.0
PLAIN_OPTIONS = {"user": "--user", "read_only": "--read-only"}
REPEATED_OPTIONS = {"cap_drop": "--cap-drop", "tmpfs": "--tmpfs", "security_opt": "--security-opt"}
USED = {*PLAIN_OPTIONS, *REPEATED_OPTIONS, "command", "depends_on", "entrypoint", "environment"}
USED |= {"healthcheck", "image", "volumes"}
# What a container does without that is looked at for minutes, by its address and in a network of its own.
UNUSED = {"build", "init", "logging", "networks", "ports", "profiles", "restart", "shm_size", "stop_grace_period"}


@dataclass(slots=True)
class Site:
    """A compose project in a network of its own; services are reached by address, and by name from each other."""

    tools: Tools
    env_file: Path
    images: dict[str, str]
    services: dict[str, Any] = field(init=False)
    _addresses: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.services = compose_services(self.env_file)
        self._addresses = {name: f"{SUBNET}.{10 + number}" for number, name in enumerate(sorted(self.services))}
        self.remove()  # what a run that was killed has left
        run(self.tools.podman("network", "create", "--subnet", f"{SUBNET}.0/24", NETWORK))

    def url(self, service: str, port: int) -> str:
        """For a client on this machine."""
        return f"http://{self._addresses[service]}:{port}"

    def start(self, service: str) -> None:
        """Start one service when what it depends on is there; nothing that was said of it is left out in silence.

        Raises:
            CheckError: it, or what it depends on, did not get there.
        """
        settings = self.services[service]
        unknown = set(settings) - USED - UNUSED
        if unknown:
            raise CheckError(f"compose.yaml says {sorted(unknown)} of {service}, which this check knows nothing of")
        for other, how in (settings.get("depends_on") or {}).items():
            if how["condition"] == "service_healthy":
                self.wait_until_healthy(other)
            elif how["condition"] == "service_completed_successfully":
                self._wait_until_completed(other)
        address = ["--network", NETWORK, "--ip", self._addresses[service]]
        run(self.tools.podman("run", "--detach", "--name", _container(service), *address, *self._options(service)))

    def run_once(self, service: str, entrypoint: list[str], command: list[str]) -> str:
        """Run something else in a service's image, with its user, mounts and environment; gives its output."""
        changed = {"entrypoint": entrypoint, "command": command}
        options = self._options(service, changed)
        return run(self.tools.podman("run", "--rm", "--network", NETWORK, *options)).stdout

    def check_health(self, service: str) -> bool:
        """What the service's own health check says now."""
        kind, *words = self.services[service]["healthcheck"]["test"]
        # As compose does, which has unescaped $$ only when it gives the text to an engine.
        words = [word.replace("$$", "$") for word in words]
        command = words if kind == "CMD" else ["/bin/sh", "-c", *words]
        return run(self.tools.podman("exec", _container(service), *command), check=False).returncode == 0

    def wait_until_healthy(self, service: str) -> None:
        """Raise CheckError with the end of its log where the service ends, or isn't healthy in time."""
        end = time.monotonic() + HEALTHY_SECONDS
        while not self.check_health(service):
            if self.state(service) != "running" or time.monotonic() > end:
                raise CheckError(f"{service} is {self.state(service)} and not healthy\n{self.log(service)[-3000:]}")
            time.sleep(LOOK_SECONDS)

    def state(self, service: str) -> str:
        """``running``, ``exited``, …"""
        return run(self.tools.podman("inspect", "--format", "{{.State.Status}}", _container(service))).stdout.strip()

    def signal(self, service: str, name: str) -> None:
        """Send a signal to its first process."""
        run(self.tools.podman("kill", "--signal", name, _container(service)))

    def log(self, service: str) -> str:
        """All that it has printed."""
        return run(self.tools.podman("logs", _container(service)), check=False).stdout

    def remove(self) -> None:
        """End and remove all containers, volumes and the network."""
        run(self.tools.podman("rm", "--all", "--force", "--time", "0", "--volumes"), check=False)
        run(self.tools.podman("volume", "prune", "--force"), check=False)
        run(self.tools.podman("network", "rm", "--force", NETWORK), check=False)

    def _wait_until_completed(self, service: str) -> None:
        end = time.monotonic() + SETUP_SECONDS
        while self.state(service) == "running":
            if time.monotonic() > end:
                raise CheckError(f"{service} did not end\n{self.log(service)[-3000:]}")
            time.sleep(LOOK_SECONDS)
        status = run(self.tools.podman("wait", _container(service))).stdout.strip()
        if status != "0":
            raise CheckError(f"{service} ended with exit status {status}\n{self.log(service)[-3000:]}")

    def _options(self, service: str, changed: dict[str, Any] | None = None) -> list[str]:
        settings = self.services[service] | (changed or {})
        options = [*LIMITS]
        options += [word for name, ip in self._addresses.items() for word in ("--add-host", f"{name}:{ip}")]
        for name, value in (settings.get("environment") or {}).items():
            options += ["--env", f"{name}={_unescaped(value)}"]
        for key, option in PLAIN_OPTIONS.items():
            options += [f"{option}={str(settings[key]).lower()}"] if key in settings else []
        for key, option in REPEATED_OPTIONS.items():
            # podman has no-new-privileges without a value.
            values = [value.removesuffix(":true") for value in settings.get(key, [])]
            options += [word for value in values for word in (option, value)]
        for volume in settings.get("volumes", []):
            options += ["--volume", f"{volume['source']}:{volume['target']}"]
        if settings.get("entrypoint"):
            options += ["--entrypoint", json.dumps(settings["entrypoint"])]
        command = [_unescaped(word) for word in settings.get("command") or []]
        return [*options, self.images[settings["image"]], *command]


def compose_services(env_file: Path) -> dict[str, Any]:
    """The services as Docker Compose itself reads them."""
    compose = str(Path(sys.executable).with_name("docker-compose"))
    command = [compose, "--file", str(COMPOSE), "--env-file", str(env_file), "config", "--format", "json"]
    # Nothing of this machine's own environment: it goes before the file.
    done = run(["env", "-i", f"PATH={os.environ['PATH']}", *command])
    services: dict[str, Any] = json.loads(done.stdout)["services"]
    return services


def _container(service: str) -> str:
    return f"ckptflow-check-{service}"


def _unescaped(value: str) -> str:
    return value.replace("$$", "$")
