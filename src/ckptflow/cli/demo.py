"""``ckptflow demo``."""

from __future__ import annotations

import argparse

from ckptflow.demo.options import add_arguments, options_from


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser("demo", help="train a tiny model on two ranks and publish each of its checkpoints")
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demonstration."""
    from ckptflow.demo.main import run_demo

    return run_demo(options_from(args))
