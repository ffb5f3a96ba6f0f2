"""The files of deployments/, wherever ckptflow was installed from: a wheel brings them along."""

from __future__ import annotations

from pathlib import Path

DIRECTORY = Path("deployments")
# In a wheel, and in a checkout.
_PLACES = (Path(__file__).parent / DIRECTORY, Path(__file__).parents[2] / DIRECTORY)


def find_site_file(path: Path) -> Path:
    """``path`` if it is there; ``deployments/NAME`` is otherwise the file that came with ckptflow."""
    if path.exists() or path.parent != DIRECTORY:
        return path
    return next((place / path.name for place in _PLACES if (place / path.name).is_file()), path)
