"""Whether a rank's file still has the name under which it was saved: torch writes that name into the file."""

from __future__ import annotations

import re
from pathlib import Path

from ckptflow.errors import InconsistentCheckpointError
from ckptflow.torchfiles import TorchFile


def check_own_name(torch: TorchFile, *patterns: re.Pattern[str]) -> TorchFile:
    """The file itself, unless it was saved as another rank's.

    Args:
        torch: the open file.
        patterns: names of rank files; the groups are numbers of ranks and the like.

    Raises:
        InconsistentCheckpointError: by the same pattern, its name now has other numbers than when it was saved.
    """
    path = Path(torch.path)
    for pattern in patterns:
        saved, now = pattern.match(f"{torch.saved_as}{path.suffix}"), pattern.match(path.name)
        if saved and now and _numbers(saved) != _numbers(now):
            raise InconsistentCheckpointError(
                "a file was saved under another rank's name",
                file=path,
                expected=path.stem,
                found=torch.saved_as,
                fix="files were swapped, or copied over each other: give them back their names, or copy them again",
            )
    return torch


def _numbers(match: re.Match[str]) -> list[int]:
    return [int(group) if group and group.isdigit() else 0 for group in match.groups()]
