"""Checkpoints and parameters for runs of post-training, and looks at what a run left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from flowruns import FlowLab
from publishing import contents_of
from servers.seaweed import S3Server

MANY_FILES = ("--max-shard-size", "3KB", "--no-forward")


def converted(path: Path, out: Path, *options: str) -> dict[str, bytes]:
    """What ``ckptflow convert`` makes of the checkpoint."""
    subprocess.run([sys.executable, "-m", "ckptflow.cli", "convert", str(path), str(out), *options], check=True)
    return contents_of(out)


def objects_at(server: S3Server, uri: str) -> dict[str, bytes]:
    """All objects below a URI by name."""
    bucket, prefix = urlsplit(uri).netloc, urlsplit(uri).path.lstrip("/") + "/"
    client = server.client()
    listed = client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    found = {each["Key"]: client.get_object(Bucket=bucket, Key=each["Key"])["Body"].read() for each in listed}
    client.close()
    return {key.removeprefix(prefix): content for key, content in found.items()}


def without_record(contents: dict[str, bytes]) -> dict[str, bytes]:
    """All but ckptflow.json, which tells the seconds that the work took."""
    return {name: content for name, content in contents.items() if name != "ckptflow.json"}


def parameters(path: Path, uri: str, **destination: Any) -> dict[str, Any]:
    """Of the flow, without a forward pass."""
    return {
        "path": str(path),
        "destinations": [{"uri": uri, **destination}],
        "validation": {"forward": False},
        "recipe": {"max_shard_bytes": 20_000},
    }


def first_nan(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed[3, 5] = float("nan")
    return changed


def everything_about(lab: FlowLab, run: Any) -> Iterator[str]:
    """All that the server tells of a run, and the server's whole database."""
    yield json.dumps([run, lab.task_runs(run), lab.artifacts(run), lab.logs(run)])
    for path in lab.server.home.glob("prefect.db*"):
        yield path.read_bytes().decode("latin-1")


def wait_for(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    """Poll until it is so."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.002)


def kill(process: subprocess.Popen[str]) -> None:
    """``kill -9`` the process and its children."""
    os.killpg(process.pid, signal.SIGKILL)
    finish_killed(process)


def finish_killed(process: subprocess.Popen[str]) -> None:
    """Wait for a process that gets a signal."""
    process.communicate(timeout=100)
    assert process.returncode == -signal.SIGKILL


def written_files(work: Path) -> dict[str, tuple[int, int]]:
    """Name → inode and mtime of each weight file that has its final name."""
    found = [each for each in work.rglob("model-*.safetensors") if not each.name.startswith(".")]
    return {each.name: (each.stat().st_ino, each.stat().st_mtime_ns) for each in found}
