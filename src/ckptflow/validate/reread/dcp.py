"""torch DCP directories: each entry is a ``torch.save`` file, loaded by ``torch.load`` and put at its offsets.

torch's own loader unpickles ``.metadata`` without a guard, so only its content is taken through ckptflow's door to
pickle; what it means is read here again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptflow.errors import InconsistentCheckpointError
from ckptflow.tensors import Shape
from ckptflow.torchfiles import read_pickle, stub_state
from ckptflow.validate.reread.base import by_ending, put_together
from ckptflow.validate.reread.mapped import MappedFiles, MappedTensor

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

OPTIMIZER = "optim"
"""Keys that begin so are its states: two thirds of all entries."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Boxes of a tensor that have elements.

    Attributes:
        offsets: [chunks, dims], in elements.
        sizes: the same.
    """

    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def meeting(self, offsets: Shape, sizes: Shape) -> Iterator[tuple[Shape, Shape]]:
        """Offsets and sizes of those that have elements in a box."""
        import numpy as np

        ends = np.add(offsets, sizes)
        meets = ((self.offsets < ends) & (self.offsets + self.sizes > offsets)).all(axis=1)
        for index in np.flatnonzero(meets):
            yield tuple(self.offsets[index].tolist()), tuple(self.sizes[index].tolist())


class DcpRereader:
    """Tensors that ``.metadata`` lists, under the names that a person would give them."""

    how = "torch.load of every DCP entry, placed by the offsets in .metadata"

    def __init__(self, directory: Path, files: Mapping[str, Path]) -> None:
        self._files = files
        state = stub_state(read_pickle((directory / ".metadata").read_bytes(), str(directory / ".metadata")))
        entries = _mapping(state, "state_dict_metadata").items()
        self._tensors = {str(fqn): stub_state(entry) for fqn, entry in entries if not str(fqn).startswith(OPTIMIZER)}
        self._places: dict[tuple[str, Shape], dict[str, Any]] = {}
        for index, info in _mapping(state, "storage_data").items():
            where = stub_state(index)
            if where.get("offset") is not None and str(where["fqn"]) in self._tensors:
                self._places[str(where["fqn"]), _sizes(where["offset"])] = dict(stub_state(info))
        self._look_up = by_ending(self._tensors, ("", "model."))
        self._mapped = MappedFiles()
        self._entry = lru_cache(maxsize=4096)(self._load_entry)
        # Megatron stacks all layers and experts in one key, which is asked for as often as there are tensors in it.
        self.stored_shape = lru_cache(maxsize=1024)(self._find_shape)
        self._chunks = lru_cache(maxsize=16)(self._find_chunks)

    def shape(self, fqn: str) -> Shape | None:
        key = self._look_up(fqn)
        return None if key is None else self.stored_shape(key)

    def read(self, fqn: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        return self.read_stored(self._look_up(fqn) or fqn, offsets, sizes)

    def _find_shape(self, key: str) -> Shape | None:
        """Shape of a key; None where there is none, or its entries are compressed."""
        if "size" not in self._tensors.get(key, {}):
            return None
        places = [self._places.get((key, tuple(offsets))) for offsets in self._chunks(key).offsets.tolist()]
        plain = all(p is not None and not p.get("transform_descriptors") for p in places)
        return _sizes(self._tensors[key]["size"]) if plain else None

    def _find_chunks(self, key: str) -> Chunks:
        import numpy as np

        boxes = [stub_state(chunk) for chunk in self._tensors[key]["chunks"]]  # type: ignore[attr-defined]
        found = [(_sizes(box["offsets"]), _sizes(box["sizes"])) for box in boxes]
        kept = [(offsets, sizes) for offsets, sizes in found if prod(sizes)]
        shape = (len(kept), 2, len(_sizes(self._tensors[key]["size"])))
        table = np.array(kept, np.int64).reshape(shape)
        return Chunks(table[:, 0], table[:, 1])

    def read_stored(self, key: str, offsets: Shape, sizes: Shape) -> torch.Tensor:
        """As ``read``, of a key as ``.metadata`` has it."""
        parts = (
            (at, extent, partial(self._read_entry, key, at, extent))
            for at, extent in self._chunks(key).meeting(offsets, sizes)
        )
        return put_together(key, offsets, sizes, parts)

    def _read_entry(self, key: str, at: Shape, extent: Shape, offsets: Shape, sizes: Shape) -> torch.Tensor:
        entry = self._entry(key, at)
        if entry.shape != extent:
            raise InconsistentCheckpointError(
                "an entry has another shape than .metadata says",
                tensor=key,
                expected=list(extent),
                found=list(entry.shape),
            )
        return entry.read(offsets, sizes)

    def _load_entry(self, key: str, at: Shape) -> MappedTensor:
        place = self._places[key, at]
        return self._mapped.tensor(self._files[place["relative_path"]], place["offset"], place["length"])


def _mapping(state: Mapping[str, object], name: str) -> Mapping[Any, Any]:
    value = state.get(name)
    if not isinstance(value, dict):
        raise RuntimeError(f".metadata holds no {name}")
    return value


def _sizes(value: Any) -> Shape:
    return tuple(int(n) for n in value)
