"""The command line: one module per command, each with ``add_parser`` and ``run``.

Exit status: 0 done, 1 refused or failed with one clear message on stderr, 2 wrong usage. Only the command that was
asked for is imported beyond its options, so that the light ones answer at once.
"""

from ckptflow.cli.main import main

__all__ = ["main"]
