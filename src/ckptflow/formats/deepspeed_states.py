"""DeepSpeed's model and optimizer files as typed records: their metadata is checked here, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ckptflow.errors import CorruptFileError, UnsupportedCheckpointError
from ckptflow.formats.deepspeed_files import STATE_FILES
from ckptflow.formats.deepspeed_steps import common_facts, optimizer_steps
from ckptflow.formats.files import checked_file
from ckptflow.formats.own_name import check_own_name
from ckptflow.formats.torch_tensors import TENSOR_TYPES, dtype_of, plain_tensor
from ckptflow.tensors import Shape, SourceFile
from ckptflow.torchfiles import LazyTensor, Stub, TorchFile, open_torch_file, stub_state

# Top-level keys of a model file that DeepSpeed itself writes (engine.py, _save_checkpoint); all others are the
# client state that the trainer gave.
_OWN_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "sparse_tensor_module_names",
        "csr_tensor_module_names",
        "num_experts",
        "ds_autoep_layers",
        "universal_checkpoint_info",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """What one ``*_model_states.pt`` says.

    Attributes:
        file: the file.
        torch: its content.
        module: FQN → weights in the compute dtype; None for pipelines, empty tensors under stage 3.
        extras: names in ``module`` that are no tensors, such as a module's extra state.
        param_shapes: trained parameters, one dict a param group, in the order of the flat vectors; None without ZeRO.
        frozen_shapes: frozen parameters; empty where the file doesn't list them.
        frozen_fragments: their values, whole (stages 1, 2) or one rank's slice (stage 3).
        shared: alias FQN → owner FQN.
        buffer_names: names of buffers in ``module``.
        settings: plain top-level values, such as ``global_steps``.
        client_keys: top-level keys that the trainer added.
    """

    file: SourceFile
    torch: TorchFile
    module: Mapping[str, LazyTensor] | None
    extras: tuple[str, ...]
    param_shapes: Sequence[Mapping[str, Shape]] | None
    frozen_shapes: Mapping[str, Shape]
    frozen_fragments: Mapping[str, LazyTensor]
    shared: Mapping[str, str]
    buffer_names: frozenset[str]
    settings: Mapping[str, object]
    client_keys: tuple[str, ...]

    def number(self, key: str) -> int | None:
        """A top-level integer; None where it is not there."""
        value = self.settings.get(key)
        return value if type(value) is int else None

    def zero_config(self, key: str) -> object:
        """A value of ``ds_config.zero_optimization``; None where it is not there."""
        config = self.settings.get("ds_config")
        section = config.get("zero_optimization") if isinstance(config, Mapping) else None
        return section.get(key) if isinstance(section, Mapping) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStates:
    """What one ``*_optim_states.pt`` says of the fp32 masters.

    Attributes:
        file: the file.
        torch: its content.
        sharded_params: True for stage 3, where each parameter is cut on its own.
        masters: one flat tensor a param group (stage 3: a sub-group).
        partition_counts: ranks that share each group; one number for all groups under stage 3.
        paddings: elements that were cut off the end of this rank's slice of each group; None where not told.
        alignment_paddings: whether single parameters are padded, too.
        fragments: for each group FQN → (start, numel) in this rank's slice; None where not told.
        steps: optimizer steps of all groups, as far as the file tells.
        common: what all ranks of one save agree on; None where the file doesn't tell.
    """

    file: SourceFile
    torch: TorchFile
    sharded_params: bool
    masters: tuple[LazyTensor, ...]
    partition_counts: tuple[int, ...]
    paddings: tuple[int, ...] | None
    alignment_paddings: bool
    fragments: tuple[Mapping[str, tuple[int, int]], ...] | None
    steps: tuple[float, ...]
    common: Mapping[str, object]


def read_model_states(path: Path, root: Path) -> ModelStates:
    """Open a model file.

    Raises:
        CheckpointError: it is incomplete, corrupt, unsafe or of an unknown kind.
    """
    file = checked_file(path, root)
    torch = check_own_name(open_torch_file(path), *STATE_FILES)
    top = _mapping(torch.value, file, "the model states")
    if "module" not in top:
        raise CorruptFileError(
            "not a DeepSpeed model states file", file=path, expected="a key `module`", found=list(top)[:8]
        )
    for key, name in (("ds_autoep_layers", "AutoEP"), ("autoep_layers", "AutoEP")):
        if top.get(key):
            raise UnsupportedCheckpointError(f"DeepSpeed {name} checkpoints are not supported", file=path, found=key)
    shapes = top.get("param_shapes")
    module = top["module"]
    return ModelStates(
        file=file,
        torch=torch,
        module=None if module is None else tensors_in(module, file, "module"),
        extras=_extras(module),
        param_shapes=None if shapes is None else [_shapes(group, file) for group in _groups(shapes, file)],
        frozen_shapes=_shapes(top.get("frozen_param_shapes") or {}, file),
        frozen_fragments=tensors_in(top.get("frozen_param_fragments") or {}, file, "frozen_param_fragments"),
        shared=_shared(top.get("shared_params") or {}, file),
        buffer_names=frozenset(_names(top.get("buffer_names"))),
        settings=top,
        client_keys=tuple(str(key) for key in top if key not in _OWN_KEYS),
    )


def read_optim_states(path: Path, root: Path) -> OptimStates:
    """Open an optimizer file; its moments stay unread.

    Raises:
        CheckpointError: it is incomplete, corrupt, unsafe or of an unknown kind.
    """
    file = checked_file(path, root)
    torch = check_own_name(open_torch_file(path), *STATE_FILES)
    top = _mapping(torch.value, file, "the optimizer states")
    state = _mapping(top.get("optimizer_state_dict"), file, "optimizer_state_dict")
    sharded = "fp32_flat_groups" in state
    masters = state.get("fp32_flat_groups" if sharded else "single_partition_of_fp32_groups")
    if not isinstance(masters, (list, tuple)):
        raise UnsupportedCheckpointError(
            "no fp32 masters in a DeepSpeed optimizer file",
            file=path,
            expected="single_partition_of_fp32_groups (ZeRO 1, 2) or fp32_flat_groups (ZeRO 3)",
            found=", ".join(map(str, list(state)[:10])),
        )
    optimizer = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    flat = [item for group in masters for item in (group if isinstance(group, (list, tuple)) else (group,))]
    return OptimStates(
        file=file,
        torch=torch,
        sharded_params=sharded,
        masters=tuple(_flat(item, file) for item in flat),
        partition_counts=_counts(state.get("partition_count"), file),
        paddings=_integers(state.get("group_paddings")),
        alignment_paddings=_any_nonzero(state.get("param_alignment_paddings")),
        fragments=_fragments(state.get("param_slice_mappings")),
        steps=optimizer_steps(optimizer),
        common=common_facts(state, optimizer),
    )


def _mapping(value: object, file: SourceFile, what: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise CorruptFileError(f"{what}: not a dict", file=file.path, found=type(value).__name__)
    return cast("Mapping[str, object]", value)


def _groups(value: object, file: SourceFile) -> Sequence[object]:
    if isinstance(value, Mapping):  # before 0.5 there was one dict for all groups
        return [value]
    if not isinstance(value, (list, tuple)):
        raise CorruptFileError("param_shapes is not a list", file=file.path, found=type(value).__name__)
    return value


def _shapes(value: object, file: SourceFile) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for name, shape in _mapping(value, file, "parameter shapes").items():
        sizes = _integers(shape)
        if sizes is None or any(not 0 <= size < 2**48 for size in sizes):
            raise CorruptFileError("a parameter has no shape", file=file.path, tensor=str(name), found=repr(shape)[:80])
        shapes[str(name)] = sizes
    return shapes


def tensors_in(value: object, file: SourceFile, what: str) -> dict[str, LazyTensor]:
    """The tensors of a flat dict.

    Raises:
        CorruptFileError: it is no dict.
        UnsupportedCheckpointError: a tensor of it can't be read as it is.
    """
    entries = _mapping(value, file, what)
    return {
        str(name): plain_tensor(str(name), item, file.path)
        for name, item in entries.items()
        if isinstance(item, TENSOR_TYPES)
    }


def _extras(module: object) -> tuple[str, ...]:
    if not isinstance(module, Mapping):
        return ()
    return tuple(str(name) for name, item in module.items() if not isinstance(item, TENSOR_TYPES))


def _names(value: object) -> list[str]:
    return [str(name) for name in value] if isinstance(value, (list, tuple, set, frozenset)) else []


def _shared(value: object, file: SourceFile) -> dict[str, str]:
    return {str(alias): str(owner) for alias, owner in _mapping(value, file, "shared_params").items()}


def _flat(value: object, file: SourceFile) -> LazyTensor:
    if not isinstance(value, LazyTensor) or len(value.shape) != 1 or not value.is_contiguous:
        raise CorruptFileError("an fp32 partition is not a flat tensor", file=file.path, found=repr(value)[:120])
    tensor = plain_tensor("fp32 partition", value, file.path)
    if dtype_of("fp32 partition", tensor.dtype_name, file.path).kind != "float":
        raise CorruptFileError("an fp32 partition is not floating point", file=file.path, found=tensor.dtype_name)
    return tensor


def _counts(value: object, file: SourceFile) -> tuple[int, ...]:
    counts = (value,) if type(value) is int else _integers(value)
    if not counts or any(not 1 <= count <= 2**20 for count in counts):
        raise CorruptFileError("no usable partition_count", file=file.path, found=repr(value)[:80])
    return counts


def _integers(value: object) -> tuple[int, ...] | None:
    if isinstance(value, (list, tuple)) and all(type(item) is int for item in value):
        return tuple(value)
    return None


def _any_nonzero(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_any_nonzero(item) for item in value)
    return isinstance(value, int) and value != 0


def _fragments(value: object) -> tuple[Mapping[str, tuple[int, int]], ...] | None:
    """``param_slice_mappings``: ``fragment_address(numel, start)`` objects; None where they can't be read."""
    if not isinstance(value, (list, tuple)):
        return None
    groups: list[Mapping[str, tuple[int, int]]] = []
    for group in value:
        if not isinstance(group, Mapping):
            return None
        addresses: dict[str, tuple[int, int]] = {}
        for name, address in group.items():
            state = stub_state(address)
            start, numel = state.get("start"), state.get("numel")
            if not isinstance(address, Stub) or type(start) is not int or type(numel) is not int:
                return None
            addresses[str(name)] = (start, numel)
        groups.append(addresses)
    return tuple(groups)
