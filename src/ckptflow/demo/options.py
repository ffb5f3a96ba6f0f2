"""What the demo can be asked for, and the names it goes by. Cheap to import: the command line always does."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

RUN_NAME = "austen"
BUCKET = "demo"
DESTINATION = f"s3://{BUCKET}"
DEFAULT_SAVE_STEPS = (20, 120, 400)
DEFAULT_OUTPUT_DIR = Path("demo-output")
PROMPT = "It is a truth universally acknowledged, that"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the demo is asked for.

    Args:
        output_dir: each demo makes a directory of its own in it.
        save_steps: the global steps at which a checkpoint is saved; training ends at the last.
        keep: leave the servers up at the end.
    """

    output_dir: Path = DEFAULT_OUTPUT_DIR
    save_steps: tuple[int, ...] = DEFAULT_SAVE_STEPS
    keep: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ckptflow demo``."""
    parser.add_argument("--keep", action="store_true", help="leave the servers up at the end")
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        default=list(DEFAULT_SAVE_STEPS),
        metavar="N",
        help="global steps at which a checkpoint is saved; training ends at the last (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=DEFAULT_OUTPUT_DIR,
        metavar="DIR",
        help="where to work (default: demo-output)",
    )


def options_from(args: argparse.Namespace) -> DemoOptions:
    """The options that were given on the command line."""
    return DemoOptions(output_dir=args.output, save_steps=tuple(sorted(set(args.steps))), keep=args.keep)
