"""``ckptflow deploy``: set up a Prefect server, once, so that all runs by itself."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ckptflow.cli.console import print_json
from ckptflow.cli.options import add_json, local_path, not_negative
from ckptflow.cli.watch import add_places, fill_places
from ckptflow.errors import UsageError

NOTIFY_ENV = "CKPTFLOW_NOTIFY"
LEAST_HEARTBEAT_SECONDS = 30
"""Of Prefect, in which each run fails at once that is told another one."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser("deploy", help="set up work pools, limits, deployments and automations on a server")
    add_places(parser)
    parser.add_argument(
        "--file",
        type=local_path,
        default=Path("deployments/prefect.yaml"),
        metavar="YAML",
        help="the deployments (%(default)s); deployments/NAME that is not here is the one that came with ckptflow",
    )
    parser.add_argument(
        "--gpus", type=not_negative, default=1, metavar="N", help="limit behind the tag gpu (1); 0: no limit"
    )
    parser.add_argument(
        "--runs-at-once", type=not_negative, default=2, metavar="N", help="runs of post-training (2); 0: no limit"
    )
    parser.add_argument("--pool-type", metavar="TYPE", help="of new work pools (ckptflow)")
    parser.add_argument("--job-template", type=local_path, metavar="FILE", help="base job template of new work pools")
    parser.add_argument(
        "--heartbeat-seconds",
        type=_heartbeat,
        default=LEAST_HEARTBEAT_SECONDS,
        metavar="N",
        help="how often a run says that it lives (30, the least); three missed ones mean that it died",
    )
    parser.add_argument(
        "--notify",
        default=os.environ.get(NOTIFY_ENV),
        metavar="TYPE/NAME",
        help=f"notification block for refused and failed runs, such as slack-webhook/training; default: {NOTIFY_ENV}",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def _heartbeat(text: str) -> int:
    value = int(text)
    if value < LEAST_HEARTBEAT_SECONDS:
        raise argparse.ArgumentTypeError(f"must be {LEAST_HEARTBEAT_SECONDS} or more")
    return value


def run(args: argparse.Namespace) -> int:
    """Set up the server that PREFECT_API_URL names."""
    fill_places(args)
    try:
        from ckptflow_flows.deploycommand import deploy_command
        from ckptflow_flows.sitefiles import find_site_file
    except ModuleNotFoundError as error:
        if error.name not in ("prefect", "pydantic"):
            raise
        raise UsageError("`ckptflow deploy` needs Prefect", fix="pip install 'ckptflow[all]'") from error
    args.file = find_site_file(args.file)
    if args.job_template is not None:
        args.job_template = find_site_file(args.job_template)
    done = deploy_command(args)
    if args.json:
        print_json(done)
    else:
        print("\n".join(done))
    return 0
