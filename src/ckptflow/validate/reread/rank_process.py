"""The helper process behind ``FsdpRereader``: has torch load rank files, and says in JSON where their tensors lie.

torch's unpickler is written in Python and takes a fifth of a millisecond for each DTensor, of which there are as many
as tensors times ranks. Ranks are independent, so that several processes share the files; values stay in the files.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptflow.processes.collector import without_gc
from ckptflow.validate.reread.torch_stubs import Inert, load_rank_file, parts_of, trained_values

if TYPE_CHECKING:
    import torch


def main() -> int:
    """Read paths from stdin, a list in JSON; print a line of JSON for each."""
    for path in json.load(sys.stdin):
        with without_gc():
            print(json.dumps(_described(Path(path))))
    return 0


def _described(path: Path) -> dict[str, Any]:
    try:
        return _Description(path, load_rank_file(path)).content
    except (pickle.UnpicklingError, RuntimeError, TypeError, KeyError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}


class _Description:
    """One rank's state dict, without values.

    Attributes:
        content: ``tensors`` is name → number of its kind, and byte offset in the file of each part that the rank holds;
            ``kinds`` are what tensors have in common, and ``meshes`` what kinds do.
    """

    def __init__(self, path: Path, state: Mapping[str, Any]) -> None:
        self._map = _Map(path)
        self._kinds: dict[str, int] = {}
        self._meshes: dict[int, int] = {}
        self.content: dict[str, Any] = {"kinds": [], "meshes": [], "tensors": {}}
        for name, value in state.items():
            if hasattr(value, "shape"):
                self.content["tensors"][name] = self._tensor(value)

    def _tensor(self, value: torch.Tensor) -> list[int]:
        shape, parts = list(value.shape), parts_of(value)
        if parts is None:
            return self._numbered(shape, [(value, None)])
        if isinstance(parts, dict):
            return self._numbered(shape, [(trained_values(parts["_local_tensor"]), self._cut(parts["_spec"].state))])
        return self._numbered(shape, [(s.state["tensor"], _region(s.state["metadata"].state)) for s in parts[0]])

    def _numbered(self, shape: list[int], parts: Iterable[tuple[torch.Tensor, Any]]) -> list[int]:
        kinds, offsets = [], []
        for local, place in parts:
            dtype = str(local.dtype).removeprefix("torch.")
            kinds.append({"dtype": dtype, "shape": list(local.shape), "strides": list(local.stride()), "place": place})
            offsets.append(self._map.offset_of(local))
        kind = {"shape": shape, "parts": kinds}
        number = self._kinds.setdefault(json.dumps(kind), len(self._kinds))
        if number == len(self.content["kinds"]):
            self.content["kinds"].append(kind)
        return [number, *offsets]

    def _cut(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        mesh = spec["mesh"]
        if id(mesh) not in self._meshes:  # the tensors of one file share its few meshes
            self._meshes[id(mesh)] = len(self._meshes)
            self.content["meshes"].append(_mesh(mesh.state))
        return {"mesh": self._meshes[id(mesh)], "placements": [_placement(p) for p in spec["placements"]]}


def _region(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {"offsets": list(metadata["shard_offsets"]), "sizes": list(metadata["shard_sizes"])}


def _placement(placement: Inert) -> dict[str, Any]:
    kind = getattr(placement, "kind", type(placement).__name__)
    values = {**dict(zip(("dim", "split_factor"), placement.arguments, strict=False)), **placement.state}
    return {"kind": kind, **{name: values[name] for name in ("dim", "split_factor") if name in values}}


def _mesh(mesh: Mapping[str, Any]) -> dict[str, Any]:
    """Ranks in the order of a mesh's layout, and that layout: sizes alone, or shape and stride of each axis."""
    saved = mesh.get("_coordinate_on_dim")
    coordinate = None if saved is None else list(saved)
    tensor = mesh.get("mesh")
    if tensor is not None:
        return {"ranks": tensor.flatten().tolist(), "sizes": list(tensor.shape), "saved": coordinate}
    axes = mesh["_layout"].state.get("axes")
    if axes is None:
        raise pickle.UnpicklingError("a device mesh layout of an unknown torch release")
    layout = [[axis.state["shape"], axis.state["stride"]] for axis in axes]
    return {"ranks": mesh["_rank_map"].tolist(), "axes": layout, "saved": coordinate}


@dataclass(slots=True)
class _Map:
    """Where torch mapped a file: addresses of memory are places in the file."""

    path: Path
    begin: int = 0
    end: int = 0
    offset: int = 0

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Where the first element lies in the file, in bytes; 0 for a tensor without elements."""
        if not tensor.numel():
            return 0
        address = tensor.data_ptr()
        if not self.begin <= address < self.end:
            self.begin, self.end, self.offset = self._find(address)
        return address - self.begin + self.offset

    def _find(self, address: int) -> tuple[int, int, int]:
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, _, offset, *_ = line.split(maxsplit=5)
            begin, end = (int(number, 16) for number in addresses.split("-"))
            if begin <= address < end and line.endswith(str(self.path.resolve())):
                return begin, end, int(offset, 16)
        raise RuntimeError(f"torch did not map {self.path.name}")


if __name__ == "__main__":
    sys.exit(main())
