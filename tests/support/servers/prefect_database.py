"""A database that Prefect has migrated once, for all servers of a session of tests: it takes ten seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from ckptflow.files.locks import exclusive

#: A directory of the session; without it servers migrate their databases themselves.
DIRECTORY_VARIABLE = "CKPTFLOW_TEST_DATABASE"
NAME = "prefect.db"


def put_migrated_database(home: Path) -> None:
    """Into the PREFECT_HOME of a server that has none yet."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory is None or (home / NAME).exists():
        return
    made = Path(directory) / NAME
    with exclusive(made.with_suffix(".lock")):
        if not made.exists():
            _migrate(made.parent / "unfinished")
            (made.parent / "unfinished" / NAME).rename(made)
    home.mkdir(parents=True, exist_ok=True)
    shutil.copy(made, home / NAME)


def _migrate(home: Path) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
    subprocess.run(command, env=inherited | {"PREFECT_HOME": str(home)}, check=True, capture_output=True)
