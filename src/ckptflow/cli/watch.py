"""``ckptflow watch ROOT... --to DEST``: publish each checkpoint as soon as it is complete."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ckptflow.cli.options import DESTINATION, add_recipe, local_path, seconds
from ckptflow.errors import UsageError

ROOTS_ENV, DESTINATION_ENV = "CKPTFLOW_ROOTS", "CKPTFLOW_DESTINATION"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser("watch", help="publish each checkpoint as soon as it is complete; runs until stopped")
    add_places(parser)
    parser.add_argument("--policy", default="newest-first", choices=("newest-first", "in-order"))
    parser.add_argument(
        "--settle", type=seconds, metavar="SECONDS", help="time without changes (2; 30 where changes have to be polled)"
    )
    parser.add_argument("--poll", action="store_true", help="never use inotify (it is not used on NFS and the like)")
    parser.add_argument("--poll-seconds", type=seconds, default=10.0, metavar="SECONDS", help="between polls (10)")
    parser.add_argument(
        "--rescan-seconds", type=seconds, default=60.0, metavar="SECONDS", help="between full looks beside inotify (60)"
    )
    parser.add_argument(
        "--retry-seconds",
        type=seconds,
        default=300.0,
        metavar="SECONDS",
        help="before another try after a failure (300)",
    )
    parser.add_argument(
        "--pending-seconds",
        type=seconds,
        default=900.0,
        metavar="SECONDS",
        help="a run that a worker took and did not begin for so long was lost (900)",
    )
    parser.add_argument(
        "--deployment", default="post-training/post-training", metavar="FLOW/NAME", help="which deployment is started"
    )
    parser.add_argument(
        "--alive-file", type=local_path, metavar="FILE", help="touched after each look, for health checks by its age"
    )
    parser.add_argument("--in-process", action="store_true", help="no workers: do the work here, one after the other")
    parser.add_argument(
        "--work-dir", type=local_path, metavar="DIR", help="where models are made before they are published"
    )
    parser.add_argument("--keep-local", action="store_true", help="leave the models in the work directory")
    parser.add_argument("--no-local-copy", action="store_true", help="send to S3 while it is made, and prove it there")
    parser.add_argument("--no-forward", action="store_true", help="leave out the forward pass of the model")
    add_recipe(parser)
    parser.set_defaults(run=run)


def add_places(parser: argparse.ArgumentParser) -> None:
    """Where checkpoints come from and where models go."""
    parser.add_argument(
        "roots", type=local_path, nargs="*", metavar="ROOT", help=f"directories that hold runs; default: {ROOTS_ENV}"
    )
    parser.add_argument(
        "--to", action="append", metavar="DEST", help=f"{DESTINATION}; once for each; default: {DESTINATION_ENV}"
    )


def fill_places(args: argparse.Namespace) -> None:
    """Take from the environment what the command line does not say.

    Raises:
        UsageError: neither says it.
    """
    args.roots = args.roots or [Path(root) for root in os.environ.get(ROOTS_ENV, "").split(os.pathsep) if root]
    args.roots = [Path(os.path.abspath(root)) for root in args.roots]
    args.to = args.to or os.environ.get(DESTINATION_ENV, "").split()
    if not args.roots:
        raise UsageError("no directory is named", fix=f"name ROOT, or set {ROOTS_ENV}")
    if not args.to:
        raise UsageError("no destination is named", fix=f"add --to DEST, or set {DESTINATION_ENV}")


def run(args: argparse.Namespace) -> int:
    """Watch until stopped."""
    fill_places(args)
    missing = [root for root in args.roots if not root.is_dir()]
    if missing:
        raise UsageError("no such directory", found=missing[0], fix="check the path, or make it first")
    try:
        from ckptflow_flows.watchcommand import watch_command
    except ModuleNotFoundError as error:
        if error.name not in ("prefect", "pydantic"):
            raise
        raise UsageError("`ckptflow watch` needs Prefect", fix="pip install 'ckptflow[all]'") from error
    return watch_command(args)
