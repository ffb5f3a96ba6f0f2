"""What will be done: output tensors with their sources, arranged into weight files. Pure data and pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ckptflow.dtypes import DType
from ckptflow.manifest import CheckpointManifest, EqualSources, LeftOut
from ckptflow.tensors import Shape, TensorSource


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFold:
    """Fold an adapter into its base weight: ``W + scale * (B @ A)``, for DoRA rescaled by row.

    Formulas: Hu et al. 2021 (LoRA), Kalajdzievski 2023 (rsLoRA), Liu et al. 2024 (DoRA), as PEFT implements them.

    Attributes:
        a: shape ``[r, in]`` (embedding: ``[r, num_embeddings]``; convolution: ``[r, in, *kernel]``). None for a bias:
            ``b`` is then added to it as it is, times ``scale``.
        b: shape ``[out, r]`` (embedding: ``[embedding_dim, r]``; convolution: ``[out, r, 1, …]``; bias: ``[out]``).
        scale: alpha / r, or alpha / sqrt(r) for rsLoRA.
        magnitude: DoRA's vector, shape ``[out]``; None without DoRA.
        transposed: the base weight is stored ``[in, out]`` (fan_in_fan_out), or the layer is an embedding.
    """

    a: TensorSource | None
    b: TensorSource
    scale: float
    magnitude: TensorSource | None = None
    transposed: bool = False

    @property
    def sources(self) -> tuple[TensorSource, ...]:
        """What it is made of."""
        return tuple(source for source in (self.a, self.b, self.magnitude) if source is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One output tensor.

    Attributes:
        fqn: its name in the output.
        source: where its elements are; shape is the output's shape.
        dtype: element type in the output.
        source_fqns: names in the manifest that it is made of.
        fold: adapter to fold in, if any.
        kept_reason: why the dtype was not cast, for people; None where it was cast or was right already.
    """

    fqn: str
    source: TensorSource
    dtype: DType
    source_fqns: tuple[str, ...]
    fold: LoraFold | None = None
    kept_reason: str | None = None

    @property
    def sources(self) -> tuple[TensorSource, ...]:
        """All that is read for it."""
        return (self.source, *(self.fold.sources if self.fold is not None else ()))

    @property
    def shape(self) -> Shape:
        """Shape in the output, in elements."""
        return self.source.shape

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return self.source.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """One output file: ``tensors`` lie in it in this order, without holes.

    Attributes:
        name: file name, such as ``model-00001-of-00004.safetensors``.
        tensors: larger itemsize first, so that each tensor is aligned to its own itemsize.
    """

    name: str
    tensors: tuple[PlannedTensor, ...]

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors, without the header."""
        return sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidationPlan:
    """All that a conversion writes.

    Attributes:
        tensors: output tensors in the model's order.
        ties: alias FQN → owner FQN; the alias is not written, loaders tie it by the config.
        equal: sources that must hold the same bits before the result is published.
        left_out: what was in the checkpoint and is not in the output, with reasons.
        files: the weight files; empty until ``arrange_files``.
        notes: what a person should know, one sentence each.
    """

    tensors: tuple[PlannedTensor, ...]
    ties: Mapping[str, str] = field(default_factory=dict)
    equal: tuple[EqualSources, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    files: tuple[WeightFile, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all output tensors."""
        return sum(t.nbytes for t in self.tensors)


def plan_from_manifest(manifest: CheckpointManifest) -> ConsolidationPlan:
    """The identity plan: every tensor under its own name in its own dtype."""
    tensors = tuple(
        PlannedTensor(fqn=fqn, source=source, dtype=source.dtype, source_fqns=(fqn,))
        for fqn, source in manifest.tensors.items()
    )
    return ConsolidationPlan(
        tensors=tensors,
        ties=dict(manifest.ties),
        equal=manifest.equal,
        left_out=manifest.left_out,
        notes=manifest.notes,
    )


def arrange_files(plan: ConsolidationPlan, max_shard_bytes: int, stem: str = "model") -> ConsolidationPlan:
    """Cut the tensors into weight files of at most ``max_shard_bytes`` bytes of data, in the model's order.

    A tensor larger than the limit gets a file of its own. File names follow transformers: ``model.safetensors`` for
    one file, ``model-00001-of-00004.safetensors`` for several.
    """
    groups: list[list[PlannedTensor]] = [[]]
    used = 0
    for tensor in plan.tensors:
        if groups[-1] and used + tensor.nbytes > max_shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(tensor)
        used += tensor.nbytes
    count = len(groups)
    files = []
    for number, group in enumerate(groups, start=1):
        name = f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.safetensors"
        aligned = sorted(group, key=lambda t: -t.dtype.itemsize)
        files.append(WeightFile(name=name, tensors=tuple(aligned)))
    return replace(plan, files=tuple(files))
