"""Parse arguments, run one command, turn errors into messages and exit statuses."""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import ckptflow
from ckptflow.cli import (
    convert,
    demo,
    deploy,
    detect,
    disk_usage,
    inspect,
    retain,
    run,
    seed_model,
    shrink,
    upload,
    verify,
    watch,
)
from ckptflow.errors import CkptflowError, UsageError

# OpenBLAS starts a spinning thread per core as soon as numpy is loaded; nothing here multiplies matrices with it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

COMMANDS = (
    detect,
    inspect,
    convert,
    shrink,
    verify,
    upload,
    run,
    retain,
    disk_usage,
    watch,
    deploy,
    seed_model,
    demo,
)


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = argparse.ArgumentParser(
        prog="ckptflow", description="Training checkpoints in, proven Hugging Face models out."
    )
    parser.add_argument("--version", action="version", version=f"ckptflow {ckptflow.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit status."""
    _prepare_streams()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    args = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except UsageError as error:
        return _report(error, status=2)
    except CkptflowError as error:
        return _report(error, status=1)
    except BrokenPipeError:
        # The reader of our output went away (`ckptflow inspect … | head`); nothing is left to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        where = "" if error.filename is None else f"\n  file: {error.filename}"
        print(f"ckptflow: {error.strerror or error}{where}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ckptflow: interrupted; run the same command again to go on where it stopped", file=sys.stderr)
        return 130
    return status


def _prepare_streams() -> None:
    """Take away what would end a command whose work is done: a stream that is closed, or has no sign for a letter.

    The descriptor of a closed stream would go to the next file that is opened, and what is printed into that file.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _report(error: CkptflowError, status: int) -> int:
    print(f"ckptflow: {error}", file=sys.stderr)
    return status
