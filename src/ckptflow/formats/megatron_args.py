"""``args`` of a Megatron file: an argparse Namespace, and what it says about the grid of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptflow.errors import UnsupportedCheckpointError
from ckptflow.manifest import Mesh
from ckptflow.torchfiles import open_torch_file, stub_state

WHY_CONFIG = "the model's Hugging Face config: heads, query groups, experts and vocabulary size are not in the tensors"
# More ranks than any job has had; bounds the loops over a grid that a file claims.
MAX_RANKS = 10**5


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Tensor-, pipeline- and expert-parallel sizes."""

    tp: int
    pp: int
    ep: int

    @property
    def mesh(self) -> Mesh:
        """The grid as a mesh; dims of one rank are left out unless all are."""
        dims = [(name, size) for name, size in (("tp", self.tp), ("pp", self.pp), ("ep", self.ep)) if size > 1]
        return Mesh(shape=tuple(s for _, s in dims) or (1,), dim_names=tuple(n for n, _ in dims) or ("tp",))


def file_args(path: str, offset: int = 0, length: int | None = None) -> Mapping[str, Any]:
    """``args`` of a torch file as a dict; empty where it has none.

    Args:
        path: the file.
        offset: where in it the torch file begins, in bytes.
        length: its length in bytes; None is up to the end.
    """
    value = open_torch_file(path, offset=offset, length=length).value
    if isinstance(value, list) and len(value) == 1:  # Megatron's objects are saved as lists of their shards
        value = value[0]
    return namespace_args(value.get("args")) if isinstance(value, Mapping) else {}


def namespace_args(args: object) -> Mapping[str, Any]:
    """A Namespace that was read as a stub, or a plain dict."""
    return {str(k): v for k, v in args.items()} if isinstance(args, Mapping) else stub_state(args)


def grid_of(args: Mapping[str, Any], origin: str) -> Grid:
    """The grid of ranks that args describe.

    Raises:
        UnsupportedCheckpointError: args don't tell it, or experts are split in another way than the rest.
    """
    tp = _size(args, "tensor_model_parallel_size", origin)
    pp = _size(args, "pipeline_model_parallel_size", origin)
    ep = _size(args, "expert_model_parallel_size", origin, default=1)
    expert_tp = _size(args, "expert_tensor_parallel_size", origin, default=tp)
    if expert_tp != tp and args.get("num_experts"):
        raise UnsupportedCheckpointError(
            "experts are tensor-parallel in another way than the rest of the model",
            file=origin,
            expected=f"expert_tensor_parallel_size = {tp}",
            found=expert_tp,
            fix="let Megatron load it and save it with --ckpt-format torch_dist",
        )
    if tp * pp * ep > MAX_RANKS:
        raise UnsupportedCheckpointError("args claim an absurd number of ranks", file=origin, found=tp * pp * ep)
    return Grid(tp=tp, pp=pp, ep=ep)


def _size(args: Mapping[str, Any], name: str, origin: str, default: int | None = None) -> int:
    value = args.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise UnsupportedCheckpointError("args don't tell the grid of ranks", file=origin, expected=name, found=value)
    return value
