"""File systems that belong below a directory and are not mounted: what is written there lies on another disk.

Such a model would be there for whoever looks, retention too, until the file system is mounted and hides it.
"""

from __future__ import annotations

import re
from pathlib import Path

#: Fields: device, mount point, type, options (fstab(5)); spaces in them are octal.
FSTAB = Path("/etc/fstab")
_OCTAL = re.compile(r"\\([0-7]{3})")


def unmounted_above(path: Path, fstab: Path) -> Path | None:
    """The mount point at or above ``path`` that the machine's table names and where nothing is mounted; else None.

    None too where there is no table, as in containers, or where another program mounts.
    """
    try:
        lines = fstab.read_text(errors="replace").splitlines()
    except OSError:
        return None
    fields = [line.split() for line in lines if not line.lstrip().startswith("#")]
    points = [Path(_OCTAL.sub(lambda m: chr(int(m[1], 8)), row[1])) for row in fields if len(row) >= 3]
    above = [point for point in points if point.is_absolute() and path.is_relative_to(point)]
    return next((point for point in above if not point.is_mount()), None)
