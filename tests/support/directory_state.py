"""Prints what is in a directory with a converted model, in words that are the same for the same state.

``python directory_state.py OUT``: names and sha256 of all files below OUT; of ``ckptflow.json``, which tells the
seconds that the work took, the fingerprint and the files it lists.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path


def state_of(directory: Path) -> list[str]:
    """One line per file and per directory."""
    lines = []
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_dir():
            lines.append(f"{name}/")
            continue
        content = path.read_bytes()
        if path.name == "ckptflow.json":
            record = json.loads(content)
            content = json.dumps([record["fingerprint"], record["files"], record["tensors"]]).encode()
        lines.append(f"{name} {hashlib.sha256(content).hexdigest()}")
    return lines


if __name__ == "__main__":
    print("\n".join(state_of(Path(sys.argv[1]))))
