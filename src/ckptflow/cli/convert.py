"""``ckptflow convert PATH OUT``."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ckptflow.cli.console import format_bytes, print_json, progress_bar
from ckptflow.cli.options import add_json, add_recipe, local_path, request_from

if TYPE_CHECKING:
    from ckptflow.conversion import Conversion
    from ckptflow.convert import Progress


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser("convert", help="make a Hugging Face model directory out of a checkpoint")
    parser.add_argument("path", type=local_path, metavar="PATH", help="checkpoint, step directory or run directory")
    parser.add_argument("out", type=local_path, metavar="OUT", help="directory to make")
    add_recipe(parser)
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the model, or the loose files, that OUT holds"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert and say what was made."""
    from ckptflow.convert import convert

    with ExitStack() as stack:

        def on_plan(conversion: Conversion) -> Progress | None:
            bar = progress_bar(f"merging {conversion.manifest.layout}", conversion.plan.nbytes, quiet=args.json)
            return stack.enter_context(bar)

        record = convert(request_from(args, args.path, args.out, args.overwrite), on_plan)
    if args.json:
        print_json(record)
        return 0
    weights = [name for name in record["files"] if name.endswith(".safetensors")]
    size = sum(record["files"][name]["bytes"] for name in weights)
    print(f"{args.out}: {len(record['tensors'])} tensors in {len(weights)} weight files, {format_bytes(size)}")
    for entry in record["left_out"]:
        print(f"  left out: {entry['name']}: {entry['reason']}")
    for note in record["notes"]:
        print(f"  note: {note}")
    return 0
