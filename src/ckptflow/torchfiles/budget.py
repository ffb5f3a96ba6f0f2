"""A bound on what one file may make us copy."""

from __future__ import annotations

from ckptflow.errors import UnsafeFileError


class Budget:
    """Bounds what builders copy: a few bytes that name one list a thousand times shall not make a thousand lists."""

    __slots__ = ("_left", "_path")

    def __init__(self, path: str, items: int) -> None:
        self._path = path
        self._left = items

    def spend(self, items: int) -> None:
        """Counts a copy of ``items`` items.

        Raises:
            UnsafeFileError: the file makes far more copies than it has bytes.
        """
        self._left -= items
        if self._left < 0:
            raise UnsafeFileError("a pickle copies its own content over and over", file=self._path)
