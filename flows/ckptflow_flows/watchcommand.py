"""``ckptflow watch``: from options to a watcher that runs until it is told to end."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from ckptflow.discovery.watching import ReadyCheckpoint, watch
from ckptflow_flows.command import PREFECT_DEFAULTS
from ckptflow_flows.decisions import Patience
from ckptflow_flows.desk import Connect, Desk
from ckptflow_flows.making import making_from
from ckptflow_flows.starting import MAX_WAITING, Outcome, Starter
from ckptflow_flows.telling import settings_told


def watch_command(args: argparse.Namespace) -> int:
    """Watch until SIGTERM or Ctrl-C.

    Raises:
        UsageError: a destination is not one, no server is named, it has no deployment of post-training, or a variable
            holds what it can't.
    """
    making = making_from(args)
    for name, value in PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    # Prefect brings its own handlers in a flow's process; here are none but ours.
    logging.getLogger("ckptflow_flows").setLevel(logging.INFO)
    logging.getLogger("ckptflow_flows.starting").setLevel(logging.WARNING)  # what it says is printed
    logging.getLogger("httpx").setLevel(logging.WARNING)
    starter = Starter(
        making=making,
        policy=args.policy,
        patience=Patience(pending_seconds=args.pending_seconds, retry_seconds=args.retry_seconds),
        max_waiting=1 if args.in_process else MAX_WAITING,
    )
    batches = watch(
        args.roots,
        settle_seconds=args.settle,
        polling=args.poll,
        poll_seconds=args.poll_seconds,
        rescan_seconds=args.rescan_seconds,
    )
    if args.alive_file is not None:
        batches = _touching(args.alive_file, batches)
    with settings_told():
        from ckptflow_flows.watch import AWAY, watch_forever

        watch_forever(batches, Desk(starter=starter, connect=_connect(args), report=_print, away=AWAY))
    return 0


def _touching(alive_file: Path, batches: Iterator[list[ReadyCheckpoint]]) -> Iterator[list[ReadyCheckpoint]]:
    """The same, and the file is as young as the last one that was dealt with."""
    for ready in batches:
        yield ready
        alive_file.touch()


def _connect(args: argparse.Namespace) -> Connect:
    if args.in_process:
        from ckptflow_flows.inprocess import InProcessRuns

        runs = InProcessRuns()
        return lambda: nullcontext(runs)
    from ckptflow_flows.watch import server_runs

    return lambda: server_runs(args.deployment)


def _print(outcome: Outcome) -> None:
    """One line for people, and for the journal of a service."""
    moment = time.strftime("%Y-%m-%d %H:%M:%S")
    sys.stdout.write(f"{moment} {outcome.state:<9} {outcome.checkpoint.location.path}: {outcome.detail}\n")
    sys.stdout.flush()
