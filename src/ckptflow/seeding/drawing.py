"""The values of a fresh tensor at any place in it, from a counter: the same whoever asks, in whatever order.

A tensor is cut into blocks of ``BLOCK`` elements. Each block has a generator of its own (Philox 4x64, Salmon et al.,
"Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011): the key is a hash of seed and name, the counter begins at the
block's number. Values are drawn in fp32 and rounded once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckptflow.errors import UnsupportedCheckpointError
from ckptflow.seeding.fills import Constant, Fill, FreshTensor, Normal, Sequence, TruncatedNormal, Uniform, Values

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCK = 1 << 16
# A bound this many standard deviations away is never reached by a draw in fp32.
FAR_STDS = 20.0
MOST_ROUNDS = 1000


class Drawer:
    """Draws one tensor.

    Args:
        tensor: what to draw.
        seed: of the whole model.
    """

    def __init__(self, tensor: FreshTensor, seed: int) -> None:
        self._tensor = tensor
        digest = hashlib.sha256(f"{seed}\0{tensor.fqn}".encode()).digest()
        self._key = int.from_bytes(digest[:16], "little")

    def fill(self, out: NDArray[Any], start: int) -> None:
        """Write elements ``[start, start + out.size)`` of the tensor into the flat array ``out``."""
        import numpy as np

        for fill in self._tensor.fills:
            low, high = max(fill.start, start), min(fill.stop, start + out.size)
            if high > low:
                target = out[low - start : high - start]
                with np.errstate(all="ignore"):  # overflow is found by the finite check, with the tensor's name
                    self._draw(fill, low, high, target)

    def _draw(self, fill: Fill, low: int, high: int, target: NDArray[Any]) -> None:
        import numpy as np

        kind = fill.kind
        if isinstance(kind, Constant):
            target[...] = kind.value
        elif isinstance(kind, Values):
            values = np.frombuffer(kind.content, np.dtype(kind.dtype))
            target[...] = values[low - fill.start : high - fill.start]
        elif isinstance(kind, Sequence):
            target[...] = kind.start + np.arange(low, high) * kind.step
        else:
            for begin, drawn in self._blocks(kind, low, high):
                target[begin - low : begin - low + drawn.size] = drawn

    def _blocks(
        self, kind: Normal | TruncatedNormal | Uniform, low: int, high: int
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Pieces of ``[low, high)`` in fp32, with the index of each one's first element."""
        for number in range(low // BLOCK, -(-high // BLOCK)):
            first = number * BLOCK
            count = min(BLOCK, high - first)
            drawn = self._block(kind, number, count)
            begin = max(low, first)
            yield begin, drawn[begin - first :]

    def _block(self, kind: Normal | TruncatedNormal | Uniform, number: int, count: int) -> NDArray[np.float32]:
        import numpy as np

        if isinstance(kind, Uniform):
            values = self._generator(number).random(count, dtype=np.float32)
            values *= np.float32(kind.high - kind.low)
            values += np.float32(kind.low)
            return values
        values = self._normal(kind, number, count)
        if isinstance(kind, Normal) or _is_far(kind):
            return values
        for round_number in range(1, MOST_ROUNDS):
            outside = (values < kind.low) | (values > kind.high)
            if not outside.any():
                return values
            values = np.where(outside, self._normal(kind, number, count, round_number), values)
        raise UnsupportedCheckpointError(
            "the bounds of a truncated normal distribution leave hardly anything of it",
            tensor=self._tensor.fqn,
            found=str(kind),
        )

    def _normal(
        self, kind: Normal | TruncatedNormal, number: int, count: int, round_number: int = 0
    ) -> NDArray[np.float32]:
        import numpy as np

        values = self._generator(number, round_number).standard_normal(count, dtype=np.float32)
        values *= np.float32(kind.std)
        if kind.mean:
            values += np.float32(kind.mean)
        return values

    def _generator(self, number: int, round_number: int = 0) -> np.random.Generator:
        import numpy as np

        # The lowest word counts draws; a block never needs so many that it reaches the next one.
        counter = np.array([0, 0, round_number, number], np.uint64)
        return np.random.Generator(np.random.Philox(key=self._key, counter=counter))


def _is_far(kind: TruncatedNormal) -> bool:
    return min(kind.mean - kind.low, kind.high - kind.mean) > FAR_STDS * kind.std
