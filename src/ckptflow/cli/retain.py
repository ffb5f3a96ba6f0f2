"""``ckptflow retain ROOT --keep N --to DEST``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptflow.cli.console import format_bytes, print_json, print_table
from ckptflow.cli.options import add_json, local_path, seconds
from ckptflow.errors import UsageError

if TYPE_CHECKING:
    from ckptflow.retention import Decision, Removal, RetentionRequest


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser("retain", help="delete old checkpoints whose models are proven to be published")
    parser.add_argument("root", type=local_path, metavar="ROOT", help="a run, or a directory that holds runs")
    parser.add_argument("--keep", type=int, default=2, metavar="N", help="newest complete steps of each run (2)")
    parser.add_argument("--every", type=int, metavar="K", help="keep each global step that K divides")
    parser.add_argument("--best", type=int, metavar="N", help="keep the best N steps by a metric")
    parser.add_argument("--metric", metavar="NAME", help="such as eval_loss")
    parser.add_argument("--mode", choices=("min", "max"), help="whether a small or a large value is good")
    parser.add_argument(
        "--metric-file", type=local_path, metavar="FILE", help="JSON or JSON lines with step and metric"
    )
    parser.add_argument("--pin", action="append", default=[], metavar="GLOB", help="step directories that stay")
    parser.add_argument(
        "--to", action="append", required=True, metavar="DEST", help="where the models are; once for each destination"
    )
    parser.add_argument(
        "--proven-at", choices=("all", "any"), default="all", help="where a model must be before its step may go (all)"
    )
    parser.add_argument("--endpoint-url", metavar="URL", help="S3 server that isn't AWS; or set AWS_ENDPOINT_URL")
    parser.add_argument("--settle", type=seconds, default=30.0, metavar="SECONDS", help="time without changes (30)")
    parser.add_argument("--dry-run", action="store_true", help="only tell what would be deleted")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Decide, delete unless it is a dry run, and say what was done; exit 1 where a step couldn't be deleted."""
    from ckptflow.retention.survey import plan_root, retain

    request = _request(args)
    decisions, removals = (plan_root(request), []) if args.dry_run else retain(request)
    if args.json:
        print_json(_document(args, decisions, removals))
    else:
        _print(args, decisions, removals)
    failed = [removal for removal in removals if removal.outcome == "failed"]
    for removal in failed:
        print(f"ckptflow: {removal.detail}", file=sys.stderr)
    return 1 if failed else 0


def _request(args: argparse.Namespace) -> RetentionRequest:
    from ckptflow.publish.several import destinations_from
    from ckptflow.retention import KeepBest, RetentionPolicy, RetentionRequest

    best = None
    if args.best is not None:
        if args.metric is None or args.mode is None:
            raise UsageError("--best needs a metric and what is good", fix="--best N --metric NAME --mode min|max")
        best = KeepBest(count=args.best, metric=args.metric, mode=args.mode)
    elif args.metric is not None or args.mode is not None:
        raise UsageError("--metric and --mode belong to --best", fix="--best N --metric NAME --mode min|max")
    return RetentionRequest(
        root=args.root,
        policy=RetentionPolicy(keep_newest=args.keep, keep_every=args.every, keep_best=best, pinned=tuple(args.pin)),
        destinations=destinations_from(args.to, args.endpoint_url),
        proven_at=args.proven_at,
        settle_seconds=args.settle,
        metric_file=args.metric_file,
    )


def _document(
    args: argparse.Namespace, decisions: Sequence[Decision], removals: Sequence[Removal]
) -> dict[str, object]:
    return {
        "root": str(args.root),
        "dry_run": args.dry_run,
        "decisions": [decision.to_json() for decision in decisions],
        "removals": [removal.to_json() for removal in removals],
        "freed_bytes": sum(removal.freed_bytes for removal in removals),
        "would_free_bytes": sum(decision.bytes for decision in decisions if decision.action == "delete"),
    }


def _print(args: argparse.Namespace, decisions: Sequence[Decision], removals: Sequence[Removal]) -> None:
    rows = [
        (
            d.location,
            "" if d.global_step is None else d.global_step,
            format_bytes(d.bytes),
            d.action,
            "; ".join(d.reasons),
        )
        for d in decisions
    ]
    title = "what would be done" if args.dry_run else "what was decided"
    print_table(title, ("path", "step", "size", "decision", "why"), rows)
    for removal in removals:
        if removal.outcome != "failed":
            tail = f": {removal.detail}" if removal.detail else ""
            print(f"{removal.location}: {removal.outcome}{tail}")
    if args.dry_run:
        doomed = [d for d in decisions if d.action == "delete"]
        print(f"{len(doomed)} of {len(decisions)} steps would go, {format_bytes(sum(d.bytes for d in doomed))}")
        return
    done = [removal for removal in removals if removal.outcome in ("deleted", "leftover")]
    print(f"{len(done)} deleted, {format_bytes(sum(removal.freed_bytes for removal in done))} free now")
