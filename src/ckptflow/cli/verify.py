"""``ckptflow verify OUT``."""

from __future__ import annotations

import argparse

from ckptflow.cli.console import parse_bytes, print_json, print_table
from ckptflow.cli.options import add_json, local_path, seconds


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser("verify", help="prove that a model directory is whole, and is the trained model")
    parser.add_argument("out", type=local_path, metavar="OUT")
    parser.add_argument(
        "--against", type=local_path, metavar="PATH_OR_HF_DIR", help="checkpoint or model to compare with"
    )
    parser.add_argument("--forward", action="store_true", help="load it with transformers and run it")
    parser.add_argument("--config", type=local_path, metavar="DIR", help="as for convert, if the trainer left none")
    parser.add_argument("--base-model", type=local_path, metavar="DIR", help="as for convert, of an adapter")
    parser.add_argument("--memory-budget", type=parse_bytes, default=parse_bytes("256MB"), metavar="SIZE")
    parser.add_argument("--forward-memory", type=parse_bytes, metavar="SIZE", help="default: half of what is free")
    parser.add_argument("--timeout", type=seconds, default=600.0, metavar="SECONDS", help="to load and run it (600)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print each check; exit 1 where one fails."""
    from ckptflow.validate.verify import VerifyOptions, verify

    options = VerifyOptions(
        memory_budget_bytes=args.memory_budget,
        forward_memory_bytes=args.forward_memory,
        timeout_seconds=args.timeout,
        config_dir=args.config,
        base_model=args.base_model,
    )
    report = verify(args.out, against=args.against, forward=args.forward, options=options)
    if args.json:
        print_json(report.to_json())
    else:
        print_table(f"{args.out}", ("check", "status", "detail"), [(c.name, c.status, c.detail) for c in report.checks])
    report.raise_if_failed()
    return 0
