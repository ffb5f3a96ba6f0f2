"""``ckptflow shrink PATH``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ckptflow.cli.console import format_bytes, print_json, progress_bar
from ckptflow.cli.options import add_json, local_path

if TYPE_CHECKING:
    from ckptflow.shrink import ShrinkReport


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser("shrink", help="drop the bytes of torch files that no tensor uses, in place")
    parser.add_argument("path", type=local_path, metavar="PATH", help="file or directory")
    parser.add_argument(
        "--pattern",
        action="append",
        metavar="GLOB",
        help="names of the files to shrink; may be repeated (default: *.pt *.pth *.bin *.ckpt)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only tell what would be saved")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Shrink and say what was saved."""
    from ckptflow.shrink import candidate_bytes, shrink_tree

    quiet = args.json or args.dry_run
    total = 0 if quiet else candidate_bytes(args.path, args.pattern)
    with progress_bar("shrinking", total, quiet=quiet) as progress:
        report = shrink_tree(args.path, args.pattern, dry_run=args.dry_run, progress=progress)
    if args.json:
        print_json(report.to_json() | {"dry_run": args.dry_run})
    else:
        _print(report, dry_run=args.dry_run)
    for file in report.failures:
        print(f"ckptflow: {file.path}: {file.outcome}: {file.reason}", file=sys.stderr)
    return 1 if report.failures else 0


def _print(report: ShrinkReport, *, dry_run: bool) -> None:
    for file in report.files:
        if file.outcome in ("shrunk", "would-shrink"):
            sizes = f"{file.before_bytes:,} -> {file.after_bytes:,} bytes, {file.saved_bytes:,} saved"
            print(f"{file.path}: {sizes}")
        elif file.outcome in ("unchanged", "skipped"):
            print(f"{file.path}: {file.before_bytes:,} bytes, {file.outcome}: {file.reason}")
    done = [file for file in report.files if file.outcome in ("shrunk", "would-shrink")]
    looked_at = sum(file.outcome != "refused" for file in report.files)
    verb = "would be" if dry_run else "were"
    print(
        f"{len(done)} of {looked_at} files {verb} shrunk: {report.before_bytes:,} -> {report.after_bytes:,} "
        f"bytes, {report.saved_bytes:,} saved ({format_bytes(report.saved_bytes)})"
    )
