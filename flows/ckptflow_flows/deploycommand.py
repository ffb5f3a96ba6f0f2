"""``ckptflow deploy``: from options to a site, and Prefect's errors in words that help."""

from __future__ import annotations

import argparse
import os

from ckptflow.errors import UsageError
from ckptflow_flows.command import PREFECT_DEFAULTS
from ckptflow_flows.making import destinations_from
from ckptflow_flows.telling import server_told, settings_told


def deploy_command(args: argparse.Namespace) -> list[str]:
    """Set all up; gives one line for each thing that is there now.

    Raises:
        UsageError: a destination is not one, or has spaces, or a variable holds what it can't.
        CkptflowError: the server can't be reached, or Prefect refused something.
    """
    destinations_from(args.to)
    spaced = [text for text in args.to if text.split() != [text]]
    if spaced:
        raise UsageError(
            "a destination with spaces can't be put into a variable of the deployments",
            found=spaced[0],
            fix="write %20 in a file:// address, or name it in the file with the deployments",
        )
    for name, value in PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    with settings_told(), server_told():
        from ckptflow_flows.deploying import Site, deploy

        site = Site(
            file=args.file,
            roots=tuple(args.roots),
            destinations=tuple(args.to),
            gpus=args.gpus or None,
            runs_at_once=args.runs_at_once or None,
            pool_type=args.pool_type,
            job_template=args.job_template,
            heartbeat_seconds=args.heartbeat_seconds,
            notify=args.notify or None,
        )
        return deploy(site)
