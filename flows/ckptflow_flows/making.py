"""From the options of the command line to the parameters of post-training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ckptflow.publish.settings import PublishSettings
from ckptflow.publish.targets import open_target
from ckptflow_flows.decisions import Making
from ckptflow_flows.localcopy import check_local_copy
from ckptflow_flows.settings import Destination, Machine, Recipe, Validation, destinations_of


def destinations_from(texts: Sequence[str]) -> tuple[Destination, ...]:
    """What ``--to`` names, checked as far as that goes without asking anybody.

    Raises:
        UsageError: one is no destination or is named twice.
    """
    destinations = destinations_of([Destination.from_text(text) for text in texts])
    for destination in destinations:
        open_target(destination.uri, PublishSettings(endpoint_url=destination.endpoint_url)).close()
    return destinations


def making_from(args: argparse.Namespace) -> Making:
    """What the options of ``run`` and ``watch`` ask to be made of each checkpoint."""
    destinations = destinations_from(args.to)
    uris = [destination.uri for destination in destinations]
    check_local_copy(uris, keep_local=args.keep_local, no_local_copy=args.no_local_copy)
    return Making(
        destinations=destinations,
        recipe=Recipe(
            dtype=args.dtype,
            keep_dtype=tuple(args.keep_dtype),
            max_shard_bytes=args.max_shard_size,
            adapter=args.adapter,
            lora_alpha=args.lora_alpha,
            config_dir=args.config,
            base_model=args.base_model,
            allow_nonfinite=args.allow_nonfinite,
        ),
        machine=Machine(
            work_dir=args.work_dir,
            keep_local=args.keep_local,
            no_local_copy=args.no_local_copy,
            threads=args.threads,
            memory_budget_bytes=args.memory_budget,
            device=args.device,
        ),
        validation=Validation(forward=not args.no_forward),
    )
