"""Options that several commands take."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from ckptflow.cli.console import parse_bytes
from ckptflow.request import ConvertRequest

DESTINATION = (
    "file:///DIR, s3://BUCKET/PREFIX or hf://ORG/NAME; ,NAME=VALUE may follow for endpoint_url, credentials_block, "
    "visibility, license and so on"
)


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout and nothing else")


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """All that says what to make of a checkpoint."""
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32", "source"))
    parser.add_argument(
        "--keep-dtype", action="append", default=[], metavar="GLOB", help="tensors that keep their dtype"
    )
    parser.add_argument("--max-shard-size", type=parse_bytes, default=parse_bytes("5GB"), metavar="SIZE")
    parser.add_argument("--threads", type=positive, default=None, metavar="N", help="default: one per core")
    parser.add_argument("--memory-budget", type=parse_bytes, default=parse_bytes("512MB"), metavar="SIZE")
    parser.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="where to cast; the bytes are the same. auto (default): the CPU, but for 32 GB or more a free GPU",
    )
    parser.add_argument(
        "--config", type=local_path, metavar="DIR", help="config.json and tokenizer, if the trainer left none"
    )
    parser.add_argument("--base-model", type=local_path, metavar="DIR", help="base model of an adapter")
    parser.add_argument("--adapter", choices=("merge", "export"), help="fold LoRA in, or write a PEFT directory")
    parser.add_argument("--lora-alpha", type=finite, metavar="X", help="where the checkpoint does not tell it")
    parser.add_argument("--allow-nonfinite", action="store_true", help="write NaN and Inf instead of refusing them")


def request_from(args: argparse.Namespace, path: Path, out: Path, overwrite: bool) -> ConvertRequest:
    """The conversion that the options of ``add_recipe`` ask for."""
    return ConvertRequest(
        path=path,
        out=out,
        dtype=args.dtype,
        keep_dtype=tuple(args.keep_dtype),
        max_shard_bytes=args.max_shard_size,
        config_dir=args.config,
        base_model=args.base_model,
        adapter=args.adapter,
        lora_alpha=args.lora_alpha,
        allow_nonfinite=args.allow_nonfinite,
        overwrite=overwrite,
        threads=args.threads,
        memory_budget_bytes=args.memory_budget,
        device=args.device,
    )


def given(text: str) -> str:
    """Not empty: that is mostly a shell variable that was not set, and as a path it would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; the working directory is .")
    return text


def local_path(text: str) -> Path:
    """A path of this machine."""
    return Path(given(text))


def finite(text: str) -> float:
    """A number, not NaN or infinite."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError("must be finite")
    return value


def seconds(text: str) -> float:
    """A time of 0 s or more."""
    value = finite(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


def not_negative(text: str) -> int:
    """A number of 0 or more."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


def positive(text: str) -> int:
    """A number of 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value
