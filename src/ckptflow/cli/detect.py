"""``ckptflow detect ROOT...``."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ckptflow.cli.console import print_json, print_table
from ckptflow.cli.options import add_json, local_path, seconds


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser("detect", help="list the checkpoints under some directories and their state")
    parser.add_argument("roots", type=local_path, nargs="+", metavar="ROOT")
    parser.add_argument("--settle", type=seconds, default=30.0, metavar="SECONDS", help="time without changes (30)")
    parser.add_argument(
        "--to", action="append", metavar="DEST", help="where to look for published models; all of them, if repeated"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print each checkpoint with its state."""
    from ckptflow.discovery.discover import discover

    found = list(discover(args.roots, settle_seconds=args.settle))
    if args.to is not None:
        from ckptflow.publish.several import Destination
        from ckptflow.publish.status import is_published_at_all

        destinations = [Destination(uri=uri) for uri in args.to]
        found = [
            replace(f, state="published", reason=f"published under {' and '.join(args.to)}")
            if is_published_at_all(f.location, destinations)
            else f
            for f in found
        ]
    if args.json:
        print_json([f.to_json() for f in found])
        return 0
    rows = [
        (
            f.location.path,
            "" if f.location.global_step is None else f.location.global_step,
            f.location.layout,
            f.state,
            f.reason,
        )
        for f in found
    ]
    print_table("checkpoints", ("path", "step", "layout", "state", "reason"), rows)
    return 0
