"""``ckptflow inspect PATH``."""

from __future__ import annotations

import argparse
from typing import Any

from ckptflow.cli.console import format_bytes, print_json, print_table
from ckptflow.cli.options import add_json, local_path

SHOWN = 20


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser("inspect", help="say what a checkpoint holds, from its metadata alone")
    parser.add_argument("path", type=local_path, metavar="PATH")
    parser.add_argument("--config", type=local_path, metavar="DIR")
    parser.add_argument("--base-model", type=local_path, metavar="DIR")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what is there."""
    from ckptflow.inspection import inspect_checkpoint

    summary = inspect_checkpoint(args.path, config_dir=args.config, base_model=args.base_model)
    if args.json:
        print_json(summary.to_json())
        return 0
    facts: dict[str, Any] = summary.facts()
    shown = (
        ("layout", facts["layout"]),
        ("path", facts["path"]),
        ("global step", facts["global_step"]),
        ("world size", facts["world_size"]),
        ("mesh", facts["mesh"]),
        ("tensors", facts["tensor_count"]),
        ("parameters", f"{facts['parameters']:,}"),
        ("dtypes", ", ".join(f"{name} {format_bytes(size)}" for name, size in facts["bytes_by_dtype"].items())),
        ("tensor bytes", format_bytes(facts["tensor_bytes"])),
        ("storage bytes", format_bytes(facts["storage_bytes"])),
        ("wasted storage bytes", format_bytes(facts["wasted_bytes"])),
        ("adapter", facts["adapter"]),
        ("config", facts["config_dir"]),
    )
    print_table("checkpoint", ("", ""), [(name, value) for name, value in shown if value is not None])
    for alias, owner in facts["ties"].items():
        print(f"tied: {alias} is {owner}")
    for entry in facts["left_out"][:SHOWN]:
        print(f"left out: {entry['name']} ({format_bytes(entry['bytes'])}): {entry['reason']}")
    if len(facts["left_out"]) > SHOWN:
        print(f"left out: {len(facts['left_out']) - SHOWN} more; --json lists them all")
    for note in facts["notes"]:
        print(f"note: {note}")
    return 0
