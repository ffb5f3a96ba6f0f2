"""What the tests of streaming uploads share: a checkpoint whose weight files have several parts, and ways to run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ckptflow.conversion import plan_conversion
from ckptflow.publish import PublishSettings
from ckptflow.publish.streaming import Streaming, stream
from ckptflow.request import ConvertRequest

MIB = 1 << 20
SETTINGS = PublishSettings(part_size_bytes=8 * MIB, max_attempts=3, backoff_seconds=0.01, backoff_limit_seconds=0.05)

SHARD_BYTES = 18 * 10**6
HERE = Path(__file__).resolve().parent


def write_checkpoint(run_dir: Path, **options: Any) -> Path:
    """A step of two ranks, 21 million parameters: weight files of three, two and two parts."""
    from checkpoints import TINY, write_fsdp_step  # torch, which the processes that stream don't need at once

    config = {
        **TINY,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "head_dim": 128,
        "vocab_size": 8192,
        "num_hidden_layers": 4,
    }
    return write_fsdp_step(run_dir, 10, config=config, **options)


def request_for(path: Path, out: Path, **options: Any) -> ConvertRequest:
    """The conversion of all tests here."""
    return ConvertRequest(path=path, out=out, max_shard_bytes=SHARD_BYTES, **options)


def streaming_to(uri: str, path: Path, work: Path, **options: Any) -> Streaming:
    """A model on its way."""
    settings = options.pop("settings", SETTINGS)
    conversion = plan_conversion(request_for(path, work / "model", **options.pop("request", {})))
    return Streaming(conversion=conversion, uri=uri, settings=settings, **options)


def start_streaming(uri: str, path: Path, work: Path) -> subprocess.Popen[str]:
    """The same in a process of its own, which prints what was published."""
    command = [sys.executable, str(HERE / "streaming.py"), uri, str(path), str(work)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def main() -> None:
    """What ``start_streaming`` starts."""
    uri, path, work = sys.argv[1:]
    record, _ = stream(streaming_to(uri, Path(path), Path(work)))
    print(json.dumps(asdict(record)))


if __name__ == "__main__":
    main()
