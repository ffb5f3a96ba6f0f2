"""The images: the project's own, and stand-ins for what no registry here gives."""

from __future__ import annotations

import os
import re
import shutil
import sys
import urllib.request
from pathlib import Path

from tools import ROOT, CheckError, Tools, pip_mounts, pip_sources, run

DOCKERFILE = ROOT / "docker" / "Dockerfile"
IMAGE = "localhost/ckptflow-check:cpu"
STANDINS = Path(__file__).with_name("standins")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# As in the Dockerfile's base: Debian 12 has Python 3.11 too.
DEBIAN, PACKAGES = "bookworm", "python3,python3-venv,ca-certificates"


def build_image(tools: Tools) -> str:
    """Build the CPU image from the checkout; gives its base."""
    base = _pulled(tools, _default_base()) or _bootstrapped_base(tools)
    sources = pip_sources()
    index = sources.get("index-url", ["https://pypi.org/simple"])[0]
    arguments = {"BASE": base, "DEVICE": "cpu", "PIP_INDEX_URL": index}
    arguments["TORCH_INDEX"] = os.environ.get("TORCH_INDEX") or _torch_index(index)
    _build(tools, IMAGE, DOCKERFILE, ROOT, arguments, mounts=pip_mounts(tools, sources))
    return base


def service_image(tools: Tools, service: str, image: str, base: str) -> str:
    """The image that compose.yaml names for a service, or a stand-in with the same program from packages."""
    pulled = _pulled(tools, image)
    if pulled:
        return pulled
    directory = STANDINS / service
    if not directory.is_dir():
        raise CheckError(f"{image} can't be pulled, and there is no stand-in for it")
    context = tools.work_dir / f"context-{service}"
    shutil.copytree(directory, context, dirs_exist_ok=True)
    if service == "s3":
        shutil.copy2(Path(sys.executable).with_name("weed"), context)
    name = f"localhost/ckptflow-check-{service}"
    print(f"  {image} can't be pulled; a stand-in with the same program takes its place", flush=True)
    _build(tools, name, context / "Dockerfile", context, {"BASE": base}, mounts=[])
    return name


def _default_base() -> str:
    found = re.search(r"^ARG BASE=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    if found is None:
        raise CheckError(f"no ARG BASE=… in {DOCKERFILE}")
    return found[1]


def _pulled(tools: Tools, image: str) -> str | None:
    if run(tools.buildah("pull", "--quiet", image), check=False).returncode == 0:
        return image
    return None


def _bootstrapped_base(tools: Tools) -> str:
    name = f"localhost/ckptflow-check-base:{DEBIAN}"
    if run(tools.buildah("inspect", "--type", "image", name), check=False).returncode == 0:
        return name
    print(f"  {_default_base()} can't be pulled; the base is bootstrapped from Debian packages", flush=True)
    if shutil.which("debootstrap") is None:
        raise CheckError("debootstrap is needed for a base without a registry: apt-get install debootstrap")
    rootfs = tools.work_dir / "rootfs"
    shutil.rmtree(rootfs, ignore_errors=True)
    log = tools.work_dir / "debootstrap.log"
    run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", DEBIAN, str(rootfs)], log=log)
    # As an archive, which keeps who owns what.
    archive = rootfs.with_suffix(".tar")
    run(["tar", "--directory", str(rootfs), "--create", "--file", str(archive), "."])
    shutil.rmtree(rootfs)
    container = run(tools.buildah("from", "scratch")).stdout.split()[-1]
    run(tools.buildah("add", "--quiet", container, str(archive), "/"))
    run(tools.buildah("commit", "--quiet", "--rm", container, name))
    archive.unlink()
    return name


def _torch_index(index: str) -> str:
    """The Dockerfile's own, or ``index`` where that one is out of reach."""
    try:
        urllib.request.urlopen(f"{TORCH_INDEX}/torch/", timeout=20).close()
    except OSError:
        print(f"  {TORCH_INDEX} can't be reached; torch comes from where pip finds it here", flush=True)
        return index
    return TORCH_INDEX


def _build(
    tools: Tools, name: str, dockerfile: Path, context: Path, arguments: dict[str, str], mounts: list[str]
) -> None:
    words = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
    log = tools.work_dir / f"build-{name.rpartition('/')[2].replace(':', '-')}.log"
    options = ["--isolation", "chroot", "--format", "docker", "--layers", *mounts, *words]
    run(tools.buildah("build", *options, "--tag", name, "--file", str(dockerfile), str(context)), log=log)
