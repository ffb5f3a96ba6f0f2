"""Runs the flows retain and disk-usage in this process, once per case on stdin, and prints the final states.

``[{"flow": "retain", "parameters": {…}}]`` → ``[{"type", "name", "message"}]``; a process of its own, since Prefect
reads its settings once and warns of things that are not ours.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ckptflow_flows.command import PREFECT_DEFAULTS


def main() -> None:
    """Run all cases of stdin."""
    cases = json.load(sys.stdin)
    for name, value in PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    print(json.dumps([run(case) for case in cases]))


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One flow run."""
    from ckptflow_flows.disk_usage import disk_usage
    from ckptflow_flows.retain import retain

    flow = {"retain": retain, "disk-usage": disk_usage}[case["flow"]]
    state = flow(**case["parameters"], return_state=True)
    return {"type": state.type.value, "name": state.name, "message": state.message}


if __name__ == "__main__":
    main()
