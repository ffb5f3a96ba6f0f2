"""``ckptflow run PATH_OR_ROOT --to DEST...``: the post-training flow."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptflow.cli.console import print_json, print_table
from ckptflow.cli.options import DESTINATION, add_json, add_recipe, local_path, seconds
from ckptflow.errors import CkptflowError, UsageError

if TYPE_CHECKING:
    from ckptflow_flows.command import Outcome


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser("run", help="merge, prove and publish one checkpoint, or all complete ones of a run")
    parser.add_argument("path", type=local_path, metavar="PATH_OR_ROOT")
    parser.add_argument("--to", required=True, action="append", metavar="DEST", help=f"{DESTINATION}; once for each")
    parser.add_argument(
        "--work-dir", type=local_path, metavar="DIR", help="where models are made before they are published"
    )
    parser.add_argument("--keep-local", action="store_true", help="leave the model in the work directory")
    parser.add_argument("--no-local-copy", action="store_true", help="send to S3 while it is made, and prove it there")
    parser.add_argument("--no-forward", action="store_true", help="leave out the forward pass of the model")
    parser.add_argument("--settle", type=seconds, default=0.0, metavar="SECONDS", help="time without changes (0)")
    add_recipe(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the flow in this process, against the Prefect server that is configured, or one of its own."""
    try:
        from ckptflow_flows.command import run_checkpoints
    except ModuleNotFoundError as error:
        if error.name != "prefect":
            raise
        raise UsageError("`ckptflow run` needs Prefect", fix="pip install 'ckptflow[all]'") from error
    outcomes: list[Outcome] = []
    try:
        for outcome in run_checkpoints(args):
            outcomes.append(outcome)
    except (CkptflowError, KeyboardInterrupt):
        if outcomes:  # what was done before the server died, or somebody said stop, is done
            _show(outcomes, args.json)
        raise
    _show(outcomes, args.json)
    return 0 if all(o.state == "published" for o in outcomes) else 1


def _show(outcomes: Sequence[Outcome], as_json: bool) -> None:
    if as_json:
        print_json([outcome.to_json() for outcome in outcomes])
        return
    rows = [(o.path, "" if o.global_step is None else o.global_step, o.state, o.detail) for o in outcomes]
    print_table("checkpoints", ("path", "step", "state", "detail"), rows)
