"""What is there: a checkpoint described by its readers, before a byte of tensor data is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckptflow.tensors import SourceFile, TensorSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The grid of ranks that wrote the checkpoint.

    Attributes:
        shape: ranks along each mesh dim.
        dim_names: names of the mesh dims, such as ``("fsdp", "tp")``; empty where the trainer named none.
    """

    shape: tuple[int, ...]
    dim_names: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = "×".join(str(n) for n in self.shape)
        return f"{sizes} ({', '.join(self.dim_names)})" if self.dim_names else sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Something in the checkpoint that does not become an output tensor.

    Attributes:
        name: FQN, key or file name.
        reason: why it is left out, for people.
        nbytes: bytes that it takes in the checkpoint; 0 where unknown or tiny.
    """

    name: str
    reason: str
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualSources:
    """Two sources of one shape and dtype that must hold the same bits: replicas, ties, masters and their copies.

    Attributes:
        fqn: the tensor in question.
        first: the source that is written.
        second: the source that must equal it. If its dtype differs, ``first`` cast to that dtype must equal it.
        reason: what it means when they differ, for people.
    """

    fqn: str
    first: TensorSource
    second: TensorSource
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """LoRA that is in the checkpoint beside (or without) its base weights. Names are those of PEFT's config.

    Attributes:
        config: PEFT's adapter_config.json, or what could be read from the tensors; ``lora_alpha`` absent if unknown.
        prefix: what stands before the base model's own names in the FQNs of the adapter, such as ``base_model.model.``.
        config_path: the file that the config came from, if any.
        separate: the adapter was saved by itself: tensors under ``prefix`` are its own, all others the base model's.
            Otherwise base and adapter were saved as one wrapped model, and all names stand under ``prefix``.
    """

    config: Mapping[str, object]
    prefix: str
    config_path: Path | None
    separate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """One checkpoint: each tensor with the pieces that hold it, and everything else that was found.

    Attributes:
        layout: the format's name, such as ``fsdp`` or ``huggingface``.
        path: the directory or file that holds the weights.
        global_step: optimizer steps done, if the checkpoint tells.
        world_size: ranks that wrote the weights; 1 for consolidated files.
        mesh: the device mesh, if the checkpoint tells.
        tensors: FQN as the trainer wrote it (wrapper prefixes that the format knows are removed) → source.
        ties: alias FQN → owner FQN, where both are one storage in the file; the alias is not in ``tensors``.
        equal: sources that must hold the same bits, checked before anything is published.
        left_out: what is in the checkpoint but not in ``tensors``.
        files: every file that the tensors are read from.
        storage_bytes: bytes of all storages in ``files``, with what views don't use.
        wasted_bytes: bytes of storages that no tensor's view covers.
        config_dir: directory with config.json, tokenizer and so on as the trainer left them, if any.
        adapter: LoRA found in the checkpoint.
        wrapped: names may begin with the attribute under which another module holds the model; ``transforms.prefix``
            finds it.
        doubt: why the tensors may not be whole, where only a config.json could tell; None where they are.
        kinds: FQN → what the trainer called it where it tells kinds apart, such as MXNet's ``arg`` and ``aux``.
        notes: what a person should know, one sentence each.
    """

    layout: str
    path: Path
    global_step: int | None = None
    world_size: int = 1
    mesh: Mesh | None = None
    tensors: Mapping[str, TensorSource]
    ties: Mapping[str, str] = field(default_factory=dict)
    equal: tuple[EqualSources, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    files: tuple[SourceFile, ...]
    storage_bytes: int = 0
    wasted_bytes: int = 0
    config_dir: Path | None = None
    adapter: AdapterSpec | None = None
    wrapped: bool = False
    doubt: str | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
