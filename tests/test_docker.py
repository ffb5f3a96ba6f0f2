"""docker/: what the real checkers say, and that an installed ckptflow brings along what the image needs.

`make docker-test` builds the image and runs the services for real; here is what can be known without that.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
COMPOSE = DOCKER / "compose.yaml"
ENVIRONMENT = {
    "COMPOSE_PROFILES": "cpu",
    "CKPTFLOW_RUNS_DIR": "/data/runs",
    "POSTGRES_PASSWORD": "a-secret-of-the-database",
    "AWS_ACCESS_KEY_ID": "an-access-key",
    "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-store",
}
SECRETS = {name for name in ENVIRONMENT if "PASSWORD" in name or "ACCESS_KEY" in name}


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def compose(*arguments: str, file: Path = COMPOSE, **changes: str) -> subprocess.CompletedProcess[str]:
    """Docker Compose, with the variables that are named here and none of this machine's."""
    command = [program("docker-compose"), "--file", str(file), *arguments]
    environment = {"PATH": os.environ["PATH"], **ENVIRONMENT, **changes}
    wanted = {name: value for name, value in environment.items() if value}
    return subprocess.run(command, env=wanted, capture_output=True, text=True, check=False)


def services(**changes: str) -> dict[str, Any]:
    done = compose("config", "--format", "json", **changes)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["services"]
    return found


def is_ours(service: dict[str, Any]) -> bool:
    return bool(service["image"].startswith("ckptflow:"))


@pytest.mark.parametrize("path", sorted(DOCKER.rglob("Dockerfile")), ids=lambda path: path.parent.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    config = [] if path.parent == DOCKER else ["--ignore", "DL3008", "--ignore", "DL3066"]
    done = subprocess.run([program("hadolint"), *config, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text((DOCKER / "Dockerfile").read_text("utf-8").replace("USER 10001:10001", "USER root"), "utf-8")
    done = subprocess.run([program("hadolint"), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "root" in done.stdout


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_compose_accepts_the_file(profile: str) -> None:
    done = compose("config", "--quiet", COMPOSE_PROFILES=profile)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_compose_would_refuse_a_wrong_one(tmp_path: Path) -> None:
    text = COMPOSE.read_text("utf-8")
    for right, wrong in (("healthcheck:", "healthchek:"), ("postgres: {condition", "postgre: {condition")):
        path = tmp_path / "compose.yaml"
        assert right in text
        path.write_text(text.replace(right, wrong), "utf-8")
        assert compose("config", "--quiet", file=path).returncode != 0


@pytest.mark.parametrize("name", ["CKPTFLOW_RUNS_DIR", *sorted(SECRETS)])
def test_compose_does_not_start_without_a_value_that_only_the_site_knows(name: str) -> None:
    done = compose("config", "--quiet", **{name: ""})
    assert done.returncode != 0
    assert name in done.stderr


def test_the_profile_decides_which_worker_merges() -> None:
    everywhere = {"postgres", "s3", "server", "setup", "watch", "upkeep"}
    assert set(services()) == {*everywhere, "worker"}
    gpu = services(COMPOSE_PROFILES="gpu")
    assert set(gpu) == {*everywhere, "worker-gpu"}
    (device,) = gpu["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert gpu["worker-gpu"]["build"]["args"]["DEVICE"].startswith("cu")
    assert gpu["worker-gpu"]["command"] == services()["worker"]["command"] == ["ckptflow-gpu"]


def test_each_service_is_pinned_watched_over_restarted_and_given_time_to_stop() -> None:
    for name, service in services().items():
        _, _, tag = service["image"].rpartition(":")
        assert is_ours(service) or any(digit.isdigit() for digit in tag), name
        if name == "setup":
            assert service["restart"].startswith("on-failure")
            continue
        assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL"), name
        assert service["restart"] == "unless-stopped", name
        assert "stop_grace_period" in service, name


def test_our_services_are_not_root_and_write_nowhere_but_where_they_are_told() -> None:
    ours = {name: service for name, service in services().items() if is_ours(service)}
    assert len(ours) == 5
    for name, service in ours.items():
        assert service["user"] == "10001:10001", name
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        for volume in service["volumes"]:
            assert volume["type"] == "volume" or not volume["bind"].get("create_host_path", False), name


def test_checkpoints_have_the_same_path_inside_and_outside() -> None:
    seen_by = {
        name: [(volume["source"], volume["target"]) for volume in service["volumes"] if volume["type"] == "bind"]
        for name, service in services(CKPTFLOW_RUNS_DIR="/scratch/runs").items()
    }
    for name in ("setup", "watch", "upkeep", "worker"):
        assert seen_by[name] == [("/scratch/runs", "/scratch/runs")]
    assert seen_by["server"] == seen_by["postgres"] == seen_by["s3"] == []


def test_ports_are_open_to_this_machine_only() -> None:
    ports = [port for service in services().values() for port in service.get("ports", [])]
    assert {port["target"] for port in ports} == {4200, 8333}
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}


def test_secrets_reach_only_who_needs_them_and_no_image() -> None:
    of_the_store = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    needed = {
        "s3": of_the_store,
        "setup": of_the_store,
        "watch": of_the_store,
        "upkeep": of_the_store,
        "worker": of_the_store,
        "postgres": {"POSTGRES_PASSWORD"},
        "server": {"POSTGRES_PASSWORD"},
    }
    for name, service in services().items():
        values = json.dumps(service.get("environment", {}))
        assert {secret for secret in SECRETS if ENVIRONMENT[secret] in values} == needed[name], name
        rest = json.dumps({key: value for key, value in service.items() if key != "environment"})
        assert not [secret for secret in SECRETS if ENVIRONMENT[secret] in rest], name


def test_the_example_names_what_has_to_be_set_and_holds_no_secret() -> None:
    lines = (DOCKER / "example.env").read_text("utf-8").splitlines()
    told = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert set(told) >= set(ENVIRONMENT)
    assert {told[name] for name in SECRETS} == {""}
    for ignored in (".gitignore", ".dockerignore"):
        assert any(".env" in line for line in (ROOT / ignored).read_text("utf-8").splitlines())


def test_the_image_is_built_from_the_pins() -> None:
    text = (DOCKER / "Dockerfile").read_text("utf-8")
    assert "requirements/base.txt" in text
    assert "-r /build/base.txt" in text
    pins = [line for line in (ROOT / "requirements" / "base.txt").read_text("utf-8").splitlines() if line[0] != "#"]
    assert all("==" in line for line in pins)
    assert {"accelerate", "asyncpg", "boto3", "prefect", "torch", "transformers"} <= {
        line.partition("==")[0] for line in pins
    }


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, unpacked as pip would."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    for name in ("pyproject.toml", "README.md"):
        source.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, source)
    for name in ("src", "tasks", "flows", "deployments"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--wheel-dir", str(directory), str(source)], check=True)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "site-packages")
    shutil.rmtree(source)
    return directory / "site-packages"


def test_an_installed_ckptflow_has_the_deployments(installed: Path) -> None:
    brought = installed / "ckptflow_flows" / "deployments"
    for path in (ROOT / "deployments").rglob("*"):
        if path.is_file():
            assert (brought / path.relative_to(ROOT / "deployments")).read_bytes() == path.read_bytes()


def test_deploy_finds_them_from_any_directory(installed: Path, tmp_path: Path) -> None:
    find = "import sys, ckptflow_flows.sitefiles as s; print(s.find_site_file(s.Path(sys.argv[1])).resolve())"

    def found(name: str) -> str:
        command = [sys.executable, "-c", find, name]
        environment = {**os.environ, "PYTHONPATH": str(installed)}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    for name in ("prefect.yaml", "kubernetes.yaml", "kubernetes-job-template.json"):
        assert found(f"deployments/{name}") == str(installed / "ckptflow_flows" / "deployments" / name)
    assert found("prefect.yaml") == str(tmp_path / "prefect.yaml")
    own = tmp_path / "deployments" / "prefect.yaml"
    own.parent.mkdir()
    own.write_text("name: ours")
    assert found("deployments/prefect.yaml") == str(own)


def test_watch_says_that_it_is_alive_as_long_as_it_looks(tmp_path: Path) -> None:
    alive, root = tmp_path / "alive", tmp_path / "runs"
    root.mkdir()
    command = [sys.executable, "-m", "ckptflow.cli", "watch", str(root), "--to", f"file://{tmp_path}/models"]
    watching = subprocess.Popen([*command, "--in-process", "--alive-file", str(alive)])
    try:
        for _ in range(2):
            while not alive.exists():
                assert watching.poll() is None
                time.sleep(0.05)
            alive.unlink()
    finally:
        watching.terminate()
    assert watching.wait() == 130
