"""``ckptflow seed-model CONFIG OUT``."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ckptflow.cli.console import format_bytes, parse_bytes, print_json, progress_bar
from ckptflow.cli.options import add_json, given, local_path, positive

if TYPE_CHECKING:
    from ckptflow.convert import Progress
    from ckptflow.seeding.planning import Seeding


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser("seed-model", help="make a model directory with fresh weights out of a config")
    parser.add_argument(
        "config", type=given, metavar="CONFIG", help="directory, config.json, or ORG/NAME[@REVISION] on the Hub"
    )
    parser.add_argument("out", type=local_path, metavar="OUT", help="directory to make")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument(
        "--init-std",
        default="default",
        metavar="STD",
        help="default (the model's own), small-init, mt-nlg-530b, or a number",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same bytes (0)")
    parser.add_argument("--max-shard-size", type=parse_bytes, default=parse_bytes("5GB"), metavar="SIZE")
    parser.add_argument("--threads", type=positive, default=None, metavar="N", help="default: one per core")
    parser.add_argument("--memory-budget", type=parse_bytes, default=parse_bytes("512MB"), metavar="SIZE")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the model, or the loose files, that OUT holds"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make the model and say what was made."""
    from ckptflow.seeding.recipes import parse_init_std
    from ckptflow.seeding.request import SeedRequest
    from ckptflow.seeding.seed import seed_model

    request = SeedRequest(
        config=args.config,
        out=args.out,
        dtype=args.dtype,
        init_std=parse_init_std(args.init_std),
        seed=args.seed,
        max_shard_bytes=args.max_shard_size,
        overwrite=args.overwrite,
        threads=args.threads,
        memory_budget_bytes=args.memory_budget,
    )
    with ExitStack() as stack:

        def on_plan(seeding: Seeding) -> Progress | None:
            bar = progress_bar(f"drawing {seeding.model.architecture}", seeding.plan.nbytes, quiet=args.json)
            return stack.enter_context(bar)

        record = seed_model(request, on_plan)
    if args.json:
        print_json(record)
        return 0
    weights = [name for name in record["files"] if name.endswith(".safetensors")]
    size = sum(record["files"][name]["bytes"] for name in weights)
    std = record["recipe"]["std"]
    print(f"{args.out}: {len(record['tensors'])} tensors in {len(weights)} weight files, {format_bytes(size)}")
    print(
        f"  seed {request.seed}, {'the standard deviations of the model itself' if std is None else f'std {std:.6g}'}"
    )
    for note in record["notes"]:
        print(f"  note: {note}")
    return 0
