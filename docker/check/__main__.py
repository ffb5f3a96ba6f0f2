"""`make docker-test`: the image is built and really run, without a Docker daemon.

1. The CPU image is built from the checkout by buildah. Where no registry for images can be reached, its base is
   bootstrapped from Debian packages, and Postgres and SeaweedFS come from packages too; this is said.
2. The services of compose.yaml are started by podman as Docker Compose reads them: users, mounts, read-only file
   systems, health checks and order. They have a network namespace of their own.
3. The demo's training job writes two checkpoints, in a container. The site publishes them by itself.
4. What is in the bucket is fetched: each file has the sha256 that the record tells, the weights have the sha256 of a
   conversion by this checkout outside of any container, and `ckptflow verify` proves them against the checkpoint.
5. The health checks say no where watch or a worker hangs, and yes when it goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

import boto3
from images import IMAGE, build_image, service_image
from site_containers import Site, compose_services
from tools import ROOT, CheckError, Tools, require_tools, run, tools_for

STEPS = (5, 10)
RUN, BUCKET = "austen", "models"
LONG_LIVED = ("postgres", "s3", "server", "upkeep", "worker", "watch")
PUBLISHED_SECONDS, CHANGE_SECONDS = 1800.0, 300.0
USER = 10001


def main() -> int:
    """Build, then run in a network namespace; 0 when all is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "docker-test", metavar="DIR")
    parser.add_argument("--keep", action="store_true", help="keep images, so that the next time is quicker")
    parser.add_argument("--images", help=argparse.SUPPRESS)  # given where the second half starts, with its network
    args = parser.parse_args()
    work_dir = args.work_dir.absolute()
    work_dir.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    tools = None
    try:
        require_tools()
        tools = tools_for(work_dir)
        if args.images is not None:
            run_site(tools, json.loads(args.images))
            return 0
        images = build_all(tools)
        inside = [sys.executable, str(Path(__file__).parent), "--work-dir", str(tools.work_dir)]
        inside += ["--images", json.dumps(images)]
        namespace = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        status = subprocess.run([*namespace, *inside], check=False).returncode
    except CheckError as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        return 1
    finally:
        if tools is not None and args.images is None and not args.keep:
            run(tools.buildah("rmi", "--all", "--force"), check=False)
    say(f"{'passed' if status == 0 else 'FAILED'} after {time.monotonic() - begin:.0f} s")
    return status


def build_all(tools: Tools) -> dict[str, str]:
    """All images; from the name in compose.yaml to the one that is there."""
    say("building the image")
    begin = time.monotonic()
    base = build_image(tools)
    size = run(tools.podman("image", "inspect", "--format", "{{.Size}}", IMAGE)).stdout.strip()
    say(f"built in {time.monotonic() - begin:.0f} s: {int(size) / 1e9:.2f} GB on {base}")
    services = compose_services(write_env_file(tools))
    own = services["worker"]["image"]
    foreign = {name: settings["image"] for name, settings in services.items() if settings["image"] != own}
    return {own: IMAGE} | {image: service_image(tools, name, image, base) for name, image in foreign.items()}


def run_site(tools: Tools, images: dict[str, str]) -> None:
    """Start all services, train, wait, compare.

    Raises:
        CheckError: something is not as it should be.
    """
    begin = time.monotonic()
    runs_dir = tools.work_dir / "runs"
    shutil.rmtree(runs_dir, ignore_errors=True)
    runs_dir.mkdir(parents=True)
    os.chown(runs_dir, USER, USER)
    site = Site(tools=tools, env_file=write_env_file(tools), images=images)
    try:
        for service in ("postgres", "s3", "server", "setup", *LONG_LIVED[3:]):
            site.start(service)
        for service in LONG_LIVED:
            site.wait_until_healthy(service)
        say(f"all services are healthy after {time.monotonic() - begin:.0f} s")
        check_isolation(site)
        begin = time.monotonic()
        train = ["-m", "ckptflow.demo.train", str(runs_dir / RUN), "--save-steps", *map(str, STEPS)]
        site.run_once("worker", ["python"], train)
        say(f"trained on two ranks in a container in {time.monotonic() - begin:.0f} s")
        check_published(site, runs_dir / RUN, tools.work_dir / "fetched")
        check_hangs_are_seen(site)
    finally:
        logs = tools.work_dir / "logs"
        logs.mkdir(exist_ok=True)
        for service in ("setup", *LONG_LIVED):
            (logs / f"{service}.log").write_text(site.log(service))
        site.remove()


def check_isolation(site: Site) -> None:
    """The image's user is not root, and can write nowhere but to /tmp and what is mounted."""
    program = "import os; print(os.getuid(), os.access('/opt/ckptflow', os.W_OK), os.access('/etc', os.W_OK))"
    found = site.run_once("worker", ["python"], ["-c", program]).strip()
    if found != f"{USER} False False":
        raise CheckError(f"user and rights in the container: expected {USER} False False, found {found}")
    version = site.run_once("worker", ["ckptflow"], ["--version"]).strip()
    say(f"{version} runs as user {USER}, on a read-only file system")


def check_published(site: Site, run_dir: Path, fetched: Path) -> None:
    """Each step is in the bucket, whole, and what this checkout makes of it too."""
    begin = time.monotonic()
    settings = site.services["worker"]["environment"]
    client = boto3.client(
        "s3",
        endpoint_url=site.url("s3", 8333),
        region_name="us-east-1",
        aws_access_key_id=settings["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=settings["AWS_SECRET_ACCESS_KEY"],
    )
    shutil.rmtree(fetched, ignore_errors=True)
    for step in STEPS:
        prefix = f"{RUN}/step-{step}/"
        wait_for_record(site, client, f"{prefix}ckptflow.json")
        out = fetched / f"step-{step}"
        out.mkdir(parents=True)
        keys = [each["Key"] for each in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]]
        for key in keys:
            client.download_file(BUCKET, key, str(out / key.removeprefix(prefix)))
        record = json.loads((out / "ckptflow.json").read_text())
        wanted = {name: facts["sha256"] for name, facts in record["files"].items()}
        found = {path.name: sha256(path) for path in out.iterdir() if path.name != "ckptflow.json"}
        if found != wanted:
            raise CheckError(f"{prefix}: sha256 of the files there: expected {wanted}, found {found}")
        source, again = run_dir / f"global_step_{step}", fetched / f"again-{step}"
        ckptflow = [sys.executable, "-m", "ckptflow.cli"]
        run([*ckptflow, "convert", str(source), str(again)])
        weights = [path.name for path in again.glob("*.safetensors")]
        if not weights or any(sha256(again / name) != found.get(name) for name in weights):
            raise CheckError(f"{prefix}: other weights than a conversion outside of a container gives")
        run([*ckptflow, "verify", str(out), "--against", str(source)])
        say(f"step {step}: {len(found)} files, {', '.join(f'{name} {found[name][:16]}…' for name in weights)}")
    say(f"published by watch and worker, and proven, {time.monotonic() - begin:.0f} s after training ended")


def wait_for_record(site: Site, client: object, key: str) -> None:
    """The record is what is uploaded last."""
    end = time.monotonic() + PUBLISHED_SECONDS
    while not client.list_objects_v2(Bucket=BUCKET, Prefix=key).get("Contents"):  # type: ignore[attr-defined]
        if time.monotonic() > end:
            told = "\n".join(f"== {name}\n{site.log(name)[-2000:]}" for name in ("watch", "worker"))
            raise CheckError(f"s3://{BUCKET}/{key} did not appear\n{told}")
        time.sleep(2)


def check_hangs_are_seen(site: Site) -> None:
    """A health check that can't say no says nothing."""
    for service in ("watch", "worker"):
        for signal, wanted in (("STOP", False), ("CONT", True)):
            site.signal(service, signal)
            end = time.monotonic() + CHANGE_SECONDS
            while site.check_health(service) is not wanted:
                if time.monotonic() > end:
                    raise CheckError(f"{service} after SIG{signal}: its health check says {not wanted}")
                time.sleep(2)
    say("the health checks of watch and worker say no while the process hangs, and yes after it")


def write_env_file(tools: Tools) -> Path:
    """example.env with its gaps filled; the same secrets in both halves."""
    path = tools.work_dir / "check.env"
    if not path.exists():
        lines = (ROOT / "docker" / "example.env").read_text().splitlines()
        gaps = [f"{line}{secrets.token_hex(16)}" if line.endswith("=") and line[0] != "#" else line for line in lines]
        own = [f"CKPTFLOW_RUNS_DIR={tools.work_dir / 'runs'}", f"CKPTFLOW_UID={USER}", f"CKPTFLOW_GID={USER}"]
        path.touch(mode=0o600)
        path.write_text("\n".join([*gaps, *own, ""]))
    return path


def sha256(path: Path) -> str:
    """Of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def say(text: str) -> None:
    """One line, at once."""
    print(f"docker-test: {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
