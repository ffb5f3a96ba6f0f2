"""File systems that belong below a directory and are not mounted: what is written there lies on another disk.

Such a model would be there for whoever looks, retention too, until the file system is mounted and hides it.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckptflow.errors import TransientPublishError

#: Fields: device, mount point, type, options (fstab(5)); spaces in them are octal.
FSTAB = Path("/etc/fstab")
_OCTAL = re.compile(r"\\([0-7]{3})")


def check_mounted(path: Path) -> None:
    """Refuse a path at or below a mount point of the machine's table where nothing is mounted.

    Nothing is refused where there is no table, as in containers, or where another program mounts.

    Raises:
        TransientPublishError: the file system is not mounted.
    """
    unmounted = next((point for point in _mount_points() if path.is_relative_to(point) and not point.is_mount()), None)
    if unmounted is not None:
        raise TransientPublishError(
            "the file system of the destination is not mounted",
            file=path,
            expected=f"{unmounted} mounted, as {FSTAB} says",
            fix=f"mount {unmounted}, or take it out of {FSTAB}",
        )


def _mount_points() -> list[Path]:
    try:
        lines = FSTAB.read_text(errors="replace").splitlines()
    except OSError:
        return []
    rows = [line.split() for line in lines if not line.lstrip().startswith("#")]
    points = [Path(_OCTAL.sub(lambda m: chr(int(m[1], 8)), row[1])) for row in rows if len(row) >= 3]
    return [point for point in points if point.is_absolute()]  # swap has none
