"""Runs the post-training flow in this process, once per case on stdin, and prints the final states.

``{"cases": [{"parameters": {…}, "environment": {…}}]}`` → ``[{"type", "name", "message", "seconds"}]``; a process of
its own, since Prefect reads its settings once and warns of things that are not ours.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from ckptflow_flows.command import PREFECT_DEFAULTS


def main() -> None:
    """Run all cases of stdin."""
    cases = json.load(sys.stdin)["cases"]
    for name, value in PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    print(json.dumps([run(case) for case in cases]))


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One flow run."""
    from ckptflow_flows.post_training import post_training
    from ckptflow_flows.settings import PostTraining

    os.environ.update(case.get("environment", {}))
    begin = time.monotonic()
    state = post_training(PostTraining(**case["parameters"]), return_state=True)
    seconds = time.monotonic() - begin
    return {"type": state.type.value, "name": state.name, "message": state.message, "seconds": seconds}


if __name__ == "__main__":
    main()
