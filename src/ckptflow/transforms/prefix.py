"""The prefix that a wrapper put before the model's own names, found from the model that config.json describes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptflow.errors import InconsistentCheckpointError, UsageError
from ckptflow.formats.config_files import read_config
from ckptflow.manifest import CheckpointManifest, LeftOut
from ckptflow.tensors import Shape
from ckptflow.transforms.code_bases.registry import recognise

if TYPE_CHECKING:
    from ckptflow.validate.skeleton import Skeleton

NOT_IN_MODEL = "not part of the model that config.json describes"


class _NothingFitsError(InconsistentCheckpointError):
    """There is no whole model under any prefix."""


def find_prefix(
    fqns: Mapping[str, Shape], expected: Mapping[str, Shape], optional: frozenset[str] = frozenset()
) -> str:
    """The one prefix that maps names onto all expected ones, with equal shapes; often it is empty.

    Args:
        fqns: names as the trainer wrote them → shape.
        expected: names of the model → shape.
        optional: expected names that may be missing: aliases of tied weights.

    Raises:
        InconsistentCheckpointError: none or several do; the message names examples.
    """
    needed = {name: shape for name, shape in expected.items() if name not in optional}
    votes: Counter[str] = Counter()
    ends: dict[str, list[str]] = {}
    for name in needed:
        ends.setdefault(name.rsplit(".", 1)[-1], []).append(name)
    for fqn in fqns:
        votes.update({fqn.removesuffix(name) for name in ends.get(fqn.rsplit(".", 1)[-1], ()) if _ends_with(fqn, name)})
    fitting = [
        prefix
        for prefix, count in votes.items()
        if count >= len(needed) and all(fqns.get(prefix + name) == shape for name, shape in needed.items())
    ]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise InconsistentCheckpointError(
            "several prefixes lead to whole models that fit config.json",
            found=", ".join(repr(prefix) for prefix in sorted(fitting)),
            fix="save the weights of one model alone",
        )
    best = votes.most_common(1)[0][0] if votes else ""
    missing = next((n for n, shape in needed.items() if fqns.get(best + n) != shape), "")
    raise _NothingFitsError(
        "the tensors are not those of the model that config.json describes, under any prefix",
        tensor=best + missing,
        expected=f"{missing} of shape {list(needed.get(missing, ()))}, after a prefix that all names share",
        found=_found(fqns, best + missing),
        fix="name the directory with the right config.json with --config",
    )


def _ends_with(fqn: str, name: str) -> bool:
    """Prefixes end at a dot."""
    return fqn == name or fqn.endswith("." + name)


def _found(fqns: Mapping[str, Shape], wanted: str) -> str:
    if wanted in fqns:
        return f"shape {list(fqns[wanted])}"
    return ", ".join(list(fqns)[:3]) + (" …" if len(fqns) > 3 else "")


def share_first_part(fqns: Iterable[str]) -> bool:
    """Whether all names begin with one part, as they must behind a wrapper's attribute."""
    return len({fqn.partition(".")[0] for fqn in fqns}) == 1


def without_wrapper_prefix(manifest: CheckpointManifest) -> CheckpointManifest:
    """The manifest under the model's own names; what is not part of the model is left out, with the reason.

    Raises:
        UsageError: there is no config.json, and the names look like those behind a wrapper's attribute.
        InconsistentCheckpointError: the tensors don't fit the config under any prefix.
    """
    if not manifest.wrapped:
        return manifest
    if manifest.config_dir is None:
        return _without_config(manifest)
    of_code_base = _code_base_model(manifest, manifest.config_dir)
    if of_code_base is not None:
        return of_code_base
    from ckptflow.validate.skeleton import describe_model

    skeleton = describe_model(manifest.config_dir)
    if skeleton.unavailable is not None:
        return replace(manifest, notes=(*manifest.notes, f"names are kept as they are: {skeleton.unavailable}"))
    shapes = {fqn: source.shape for fqn, source in manifest.tensors.items()}
    shapes |= {alias: shapes[owner] for alias, owner in manifest.ties.items() if owner in shapes}
    keeps_names = _may_keep_names(manifest, shapes)
    try:
        prefix, model = _find_model(shapes, skeleton)
    except _NothingFitsError as error:
        if not keeps_names:
            raise
        note = f"names are kept as they are, but config.json describes a model with {error.tensor}, which is not here"
        return replace(manifest, notes=(*manifest.notes, note))
    return manifest if keeps_names and not prefix else _renamed(manifest, prefix, {*model, *skeleton.tied})


def _code_base_model(manifest: CheckpointManifest, config_dir: Path) -> CheckpointManifest | None:
    """A model under the names of another code base that has a table for its family; None where there is none."""
    names = [*manifest.tensors, *manifest.ties]
    known = recognise(names)
    if known is None or known[0].family(read_config(config_dir)) is None:
        return None
    prefix = known[1]
    inside = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    return _renamed(manifest, prefix, inside) if prefix else manifest


def _may_keep_names(manifest: CheckpointManifest, fqns: Iterable[str]) -> bool:
    """Whether names that don't fit the config may be the model's own nevertheless.

    A file that was named by its path may hold a model of another kind, such as a critic with a head of its own; Hugging
    Face files mostly have the model's own names, be it those of an older transformers.
    """
    return manifest.layout == "huggingface" or (manifest.layout == "full-state-dict" and not share_first_part(fqns))


def _find_model(shapes: Mapping[str, Shape], skeleton: Skeleton) -> tuple[str, Mapping[str, Shape]]:
    """The prefix, and the names and shapes of the model behind it."""
    tied = frozenset(skeleton.tied)
    try:
        return find_prefix(shapes, skeleton.shapes, tied), skeleton.shapes
    except _NothingFitsError as refused:
        # Trainers save the names in memory, which some models have others of than in files.
        if not skeleton.live_shapes:
            raise
        try:
            return find_prefix(shapes, skeleton.live_shapes, tied), skeleton.live_shapes
        except _NothingFitsError:
            raise refused from None


def _without_config(manifest: CheckpointManifest) -> CheckpointManifest:
    """Names are kept where two modules or more lie side by side on the first level: no prefix leads to both."""
    modules = [fqn for fqn in (*manifest.tensors, *manifest.ties) if "." in fqn]
    if not share_first_part(modules) or manifest.layout == "full-state-dict":
        return manifest
    raise UsageError(
        "the names of the tensors may carry a wrapper's prefix, and no config.json tells the model's own names",
        file=manifest.path,
        found=", ".join(modules[:3]),
        fix="name the directory with the model's config.json with --config",
    )


def _renamed(manifest: CheckpointManifest, prefix: str, model: set[str]) -> CheckpointManifest:
    names = {
        fqn: fqn.removeprefix(prefix)
        for fqn in (*manifest.tensors, *manifest.ties)
        if fqn.startswith(prefix) and fqn.removeprefix(prefix) in model
    }
    # An owner outside the model hands its bytes to the alias inside.
    tensors, ties = dict(manifest.tensors), dict(manifest.ties)
    for alias, owner in list(ties.items()):
        if alias in names and owner not in names:
            tensors[alias] = tensors[owner]
            del ties[alias]
    outside = [fqn for fqn in tensors if fqn not in names]
    notes = (f"the wrapper's prefix {prefix!r} is removed from all names",) if prefix else ()
    return replace(
        manifest,
        tensors={names[fqn]: source for fqn, source in tensors.items() if fqn in names},
        ties={names[alias]: names[owner] for alias, owner in ties.items() if alias in names and owner in names},
        equal=tuple(replace(check, fqn=names[check.fqn]) for check in manifest.equal if check.fqn in names),
        left_out=(
            *manifest.left_out,
            *(LeftOut(name=fqn, reason=NOT_IN_MODEL, nbytes=tensors[fqn].nbytes) for fqn in outside),
        ),
        notes=(*manifest.notes, *notes),
    )
