"""``ckptflow disk-usage ROOT``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptflow.cli.console import format_bytes, print_json, print_table
from ckptflow.cli.options import add_json, local_path

if TYPE_CHECKING:
    from ckptflow.diskusage.report import DiskUsage, Savings

SHOWN = 40


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser("disk-usage", help="who fills the disk: by run, step and kind of file")
    parser.add_argument("root", type=local_path, metavar="ROOT")
    parser.add_argument("--shrink", action="store_true", help="also what `shrink` would free; reads metadata")
    parser.add_argument("--keep", type=int, metavar="N", help="also what `retain --keep N` would free (2 with --to)")
    parser.add_argument("--to", action="append", default=[], metavar="DEST", help="where the models are published")
    parser.add_argument("--endpoint-url", metavar="URL", help="S3 server that isn't AWS; or set AWS_ENDPOINT_URL")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a table of the largest steps, the sums, and what could be freed."""
    from ckptflow.diskusage.report import disk_usage

    usage = disk_usage(args.root)
    savings = _savings(args)
    if args.json:
        print_json(usage.to_json() | {"savings": [each.to_json() for each in savings]})
    else:
        _print(usage, savings)
    for directory in usage.unreadable:
        print(f"ckptflow: not counted, it can't be read: {directory}", file=sys.stderr)
    return 0


def _savings(args: argparse.Namespace) -> list[Savings]:
    from ckptflow.diskusage.report import savings_of_retention, savings_of_shrinking

    savings = [savings_of_shrinking(args.root)] if args.shrink else []
    if args.keep is not None or args.to:
        from ckptflow.publish.several import destinations_from
        from ckptflow.retention import RetentionPolicy, RetentionRequest

        request = RetentionRequest(
            root=args.root,
            policy=RetentionPolicy(keep_newest=2 if args.keep is None else args.keep),
            destinations=destinations_from(args.to, args.endpoint_url) if args.to else (),
        )
        savings += savings_of_retention(request)
    return savings


def _print(usage: DiskUsage, savings: Sequence[Savings]) -> None:
    whole = max(usage.allocated_bytes, 1)
    kinds = list(usage.by_kind())
    table = usage.by_step()
    largest = sorted(table, key=lambda place: -sum(table[place].values()))[:SHOWN]
    rows = [
        (
            usage.name_of(run),
            "beside" if step is None else step,
            *(format_bytes(size) if size else "" for size in table[run, step].values()),
            format_bytes(sum(table[run, step].values())),
            f"{100 * sum(table[run, step].values()) / whole:.1f} %",
        )
        for run, step in table
        if (run, step) in largest
    ]
    if len(table) > len(largest):
        rest = usage.allocated_bytes - sum(sum(table[place].values()) for place in largest)
        blanks = [""] * len(kinds)
        rows.append(
            (f"{len(table) - len(largest)} smaller", "", *blanks, format_bytes(rest), f"{100 * rest / whole:.1f} %")
        )
    sums = [format_bytes(size) for size in usage.by_kind().values()]
    rows.append(("all", "", *sums, format_bytes(usage.allocated_bytes), "100.0 %"))
    print_table(f"disk space below {usage.root}", ("run", "step", *kinds, "sum", "share"), rows)
    for each in savings:
        print(f"{each.what}: {format_bytes(each.freed_bytes)} free, {each.count} {_counted(each)}")
    if not savings:
        print("what could be freed: --shrink, and --keep N --to DEST for retention")


def _counted(savings: Savings) -> str:
    return "files smaller" if savings.what == "shrink" else "steps less"
