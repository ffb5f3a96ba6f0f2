"""One rank's state dict of Megatron's legacy format, under Megatron-Core's names with local numbers.

Two key styles exist: Megatron-Core's flat names, and the nested ``language_model.encoder…`` of older Megatron-LM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptflow.errors import CorruptFileError, InconsistentCheckpointError, UnsupportedCheckpointError
from ckptflow.formats.files import checked_file
from ckptflow.formats.megatron_args import namespace_args
from ckptflow.formats.torch_tensors import TENSOR_TYPES, plain_tensor, source_of, storage_use
from ckptflow.manifest import LeftOut
from ckptflow.tensors import SourceFile, TensorSource, permute, unbind
from ckptflow.torchfiles import LazyTensor, open_torch_file
from ckptflow.transforms.megatron_merge import viewed
from ckptflow.transforms.megatron_names import NO_WEIGHTS

MODEL_KEY = re.compile(r"model(?P<chunk>\d*)")
MAX_NESTING = 12
OLD_STYLE = "language_model."
# Older Megatron-LM → Megatron-Core; applied to dotted names, in this order.
RENAMES = (
    (re.compile(r"^language_model\."), ""),
    (re.compile(r"^(encoder|transformer)\."), "decoder."),
    (re.compile(r"^word_embeddings_for_head\."), "output_layer."),
    (re.compile(r"\.(self_)?attention\.query_key_value\."), ".self_attention.linear_qkv."),
    (re.compile(r"\.(self_)?attention\.dense\."), ".self_attention.linear_proj."),
    (re.compile(r"\.dense_h_to_4h\."), ".linear_fc1."),
    (re.compile(r"\.dense_4h_to_h\."), ".linear_fc2."),
    (re.compile(r"\.mlp\.local_experts\."), ".mlp.experts.local_experts."),
    (re.compile(r"\.input_norm\."), ".input_layernorm."),
    (re.compile(r"\.post_attention_(layer)?norm\."), ".pre_mlp_layernorm."),
    (re.compile(r"^decoder\.final_norm\."), "decoder.final_layernorm."),
)
GROUPED = re.compile(r"(?P<prefix>.*\.mlp\.experts\.)weight(?P<which>[12])")
TE_GROUPED = re.compile(r"(?P<prefix>.*\.mlp\.experts\.)(?P<linear>linear_fc[12]\.(?:weight|bias))(?P<expert>\d+)")
EXPERT = re.compile(r"(?P<prefix>.*\.mlp\.experts\.local_experts\.)(?P<expert>\d+)(?P<rest>\..+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What one rank's file holds.

    Attributes:
        file: the file.
        args: Megatron's args.
        iteration: optimizer steps done; None where the file doesn't tell.
        chunks: per virtual pipeline stage: name with local layer and expert numbers → the rank's part.
        left_out: everything else in the file.
        storage_bytes: bytes of the weights' storages.
        wasted_bytes: bytes of them that no tensor covers.
        checksums: of all matrices, in file order; empty where the file records none.
    """

    file: SourceFile
    args: Mapping[str, Any]
    iteration: int | None
    chunks: tuple[Mapping[str, TensorSource], ...]
    left_out: tuple[LeftOut, ...]
    storage_bytes: int
    wasted_bytes: int
    checksums: tuple[int, ...]

    @property
    def has_experts(self) -> bool:
        """Whether any tensor belongs to an expert."""
        return any(".experts." in name for chunk in self.chunks for name in chunk)


def read_rank(path: Path, root: Path) -> RankState:
    """Read the structure of one rank's file.

    Raises:
        UnsupportedCheckpointError: a version whose QKV rows lie in another order.
        CheckpointError: any other subclass: the file is refused.
    """
    file = checked_file(path, root)
    value = open_torch_file(file.path).value
    if not isinstance(value, Mapping):
        raise CorruptFileError("not a Megatron checkpoint", file=path, expected="a dict", found=type(value).__name__)
    _check_version(value, path)
    keys = sorted((int(m["chunk"] or 0), k) for k in value if isinstance(k, str) and (m := MODEL_KEY.fullmatch(k)))
    if not keys or [number for number, _ in keys] != list(range(len(keys))):
        raise CorruptFileError(
            "not a Megatron checkpoint",
            file=path,
            expected="model, or model0, model1, …",
            found=", ".join(map(str, value)),
        )
    chunks, plain, left_out = [], [], _other_entries(value, {key for _, key in keys})
    for _, key in keys:
        tensors = {}
        for name, tensor in _flat(value[key], path):
            if tensor is None or NO_WEIGHTS.search(name):
                left_out.append(LeftOut(name=f"{key}.{name}", reason="no weight"))
                continue
            tensors[name] = source_of(name, tensor, file)
            plain.append(plain_tensor(name, tensor, file.path))
        chunks.append(_renamed(tensors, path))
    total, wasted = storage_use(plain)
    iteration = value.get("iteration")
    return RankState(
        file=file,
        args=namespace_args(value.get("args")),
        iteration=iteration if type(iteration) is int else None,
        chunks=tuple(chunks),
        left_out=tuple(left_out),
        storage_bytes=total,
        wasted_bytes=wasted,
        checksums=_checksums(plain),
    )


def _checksums(tensors: Iterable[LazyTensor]) -> tuple[int, ...]:
    found = [tensor.storage.crc32 for tensor in tensors if len(tensor.shape) > 1]
    return () if None in found else tuple(crc for crc in found if crc is not None)


def _check_version(value: Mapping[object, object], path: Path) -> None:
    # Megatron-LM, fix_query_key_value_ordering: below 2.0 the rows of QKV are in another order; absent means 0.
    version = value.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version < 2:
        raise UnsupportedCheckpointError(
            "an old Megatron checkpoint whose QKV rows lie in another order",
            file=path,
            expected="checkpoint_version 2.0 or later",
            found=version,
            fix="let Megatron-LM load it and save it again",
        )


def _other_entries(value: Mapping[object, object], model_keys: set[str]) -> list[LeftOut]:
    return [
        LeftOut(name=str(key), reason="training state", nbytes=_tensor_bytes(item))
        for key, item in value.items()
        if key not in model_keys
    ]


def _tensor_bytes(value: object) -> int:
    """Bytes of all tensors anywhere inside, counted by their shapes."""
    total, level, seen = 0, [value], set()
    while level:
        item = level.pop()
        if isinstance(item, LazyTensor):
            total += item.nbytes
        elif isinstance(item, Mapping | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            level.extend(item.values() if isinstance(item, Mapping) else item)
    return total


def _flat(value: object, path: Path, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Dotted name → tensor, or None for what is none."""
    if not isinstance(value, Mapping) or depth > MAX_NESTING:
        raise CorruptFileError("the model of a Megatron checkpoint is no dict of tensors", file=path, tensor=prefix)
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            yield from _flat(item, path, f"{name}.", depth + 1)
        else:
            yield name, item if isinstance(item, TENSOR_TYPES) else None


def _renamed(tensors: dict[str, TensorSource], path: Path) -> dict[str, TensorSource]:
    """Megatron-Core's names, whatever the style of the keys."""
    if not any(name.startswith(OLD_STYLE) for name in tensors):
        return tensors
    renamed: dict[str, TensorSource] = {}
    for name, source in tensors.items():
        short = name
        for pattern, replacement in RENAMES:
            short = pattern.sub(replacement, short)
        if short in renamed:
            raise InconsistentCheckpointError("two tensors for one parameter", file=path, tensor=short, found=name)
        renamed[short] = source
    return renamed


def with_global_experts(
    tensors: Mapping[str, TensorSource], ep_rank: int, local_experts: int
) -> dict[str, TensorSource]:
    """One tensor per expert, under its global number, whichever of Megatron's three ways the rank keeps them in."""
    found: dict[str, TensorSource] = {}
    for name, source in tensors.items():
        grouped, te_grouped, single = GROUPED.fullmatch(name), TE_GROUPED.fullmatch(name), EXPERT.fullmatch(name)
        if grouped:
            pattern = f"{grouped['prefix']}local_experts.{{}}.linear_fc{grouped['which']}.weight"
            parts = enumerate(_ungrouped(name, source, int(grouped["which"]), local_experts))
            pairs = [(pattern, number, part) for number, part in parts]
        elif te_grouped:
            pattern = f"{te_grouped['prefix']}local_experts.{{}}.{te_grouped['linear']}"
            pairs = [(pattern, int(te_grouped["expert"]), source)]
        elif single:
            pairs = [(f"{single['prefix']}{{}}{single['rest']}", int(single["expert"]), source)]
        else:
            found[name] = source
            continue
        for pattern, number, part in pairs:
            if number >= local_experts:
                raise InconsistentCheckpointError(
                    "a rank holds more experts than its share", tensor=name, expected=local_experts, found=number + 1
                )
            found[pattern.format(ep_rank * local_experts + number)] = part
    return found


def _ungrouped(name: str, source: TensorSource, which: int, experts: int) -> list[TensorSource]:
    """Experts out of GroupedMLP's ``weight1`` or ``weight2``.

    They are stored ``[hidden, …]`` and ``[…, hidden]`` but used as ``[experts, hidden, ffn]`` and ``[experts, ffn,
    hidden]``, transposed against a Linear (megatron/core/transformer/moe/experts.py).
    """
    hidden = source.shape[0 if which == 1 else -1] if len(source.shape) == 2 else 0
    inner = source.numel // max(experts * hidden, 1)
    shape = (experts, hidden, inner) if which == 1 else (experts, inner, hidden)
    stacked = viewed(source, shape)
    if stacked is None:
        raise UnsupportedCheckpointError(
            "grouped experts don't divide into experts", tensor=name, expected=f"{experts} experts", found=source.shape
        )
    return [permute(expert, (1, 0)) for expert in unbind(stacked)]
