"""Whether the output is the model that its config.json describes: names, shapes, ties and dtypes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ckptflow.output.sidefiles import DTYPE_KEYS
from ckptflow.transforms.ties import declares_tied
from ckptflow.validate.files import Record
from ckptflow.validate.headers import StoredTensor, bytes_by_dtype
from ckptflow.validate.report import KEYS, Check, Figure, Status, listing
from ckptflow.validate.skeleton import Skeleton

VALUE_HEAD = "v_head."
"""trl's value head lies beside the Hugging Face model; trl loads it, transformers leaves it out."""

Tensors = Mapping[str, StoredTensor]


def check_keys(tensors: Tensors, skeleton: Skeleton) -> Check:
    """transformers finds a tensor of the right shape for every parameter, and a use for every tensor."""
    name = KEYS
    if skeleton.unavailable is not None or skeleton.loading is None:
        status: Status = "warning" if skeleton.refused else "skipped"
        return Check(
            name=name, status=status, detail=f"can't be checked: {skeleton.unavailable or skeleton.not_loaded}"
        )
    loading = skeleton.loading
    value_head = [fqn for fqn in loading.unexpected if fqn.startswith(VALUE_HEAD)]
    unexpected = [fqn for fqn in loading.unexpected if not fqn.startswith(VALUE_HEAD)]
    unexpected += [fqn for fqn in _beyond_the_model(tensors, skeleton) if fqn not in unexpected]
    problems = []
    if loading.missing:
        problems.append(f"missing: {listing(loading.missing)}")
    if unexpected:
        problems.append(f"unexpected: {listing(unexpected)}")
    for fqn, (found, wanted) in loading.mismatched.items():
        problems.append(f"{fqn} has shape {list(found)}, the config says {list(wanted)}")
    if loading.errors:
        problems += [*loading.errors, f"not in the output: {listing(_absent(tensors, skeleton)) or 'nothing'}"]
    figures: dict[str, Figure] = {
        "architecture": skeleton.architecture,
        "tensors": len(tensors),
        "missing": len(loading.missing),
        "unexpected": len(unexpected),
        "wrong shape": len(loading.mismatched),
    }
    if problems:
        return Check(name=name, status="failed", detail="; ".join(problems[:8]), figures=figures)
    notes = [*skeleton.notes, *([f"{listing(value_head)}: trl's value head"] if value_head else [])]
    other = sorted(set(tensors) - set(skeleton.shapes) - set(value_head))
    if other and not set(skeleton.shapes) <= set(tensors) | set(skeleton.tied):
        notes.append(f"transformers renames {len(other)} tensors as it loads them, such as {other[0]}")
    detail = "; ".join([f"all that {skeleton.architecture} has, and nothing else", *notes])
    return Check(name=name, status="passed", detail=detail, figures=figures)


def _absent(tensors: Tensors, skeleton: Skeleton) -> list[str]:
    return sorted(set(skeleton.shapes) - set(tensors) - set(skeleton.tied))


def _beyond_the_model(tensors: Tensors, skeleton: Skeleton) -> list[str]:
    """Names with a layer or expert number that the model does not have.

    transformers stacks experts in the order of their numbers: 0, 1, 2, 4 would load as four experts, one of them wrong.
    """
    known = set(skeleton.shapes) | skeleton.live_names
    patterns = {_numberless(fqn) for fqn in skeleton.shapes}
    ignored = _ignored_layers(tensors, skeleton)
    return [fqn for fqn in tensors if fqn not in known and _numberless(fqn) in patterns and fqn not in ignored]


def _ignored_layers(tensors: Tensors, skeleton: Skeleton) -> set[str]:
    """Whole layers past the last one, which models such as DeepSeek-V3 keep for multi-token prediction.

    transformers says which ones a model leaves out on purpose: these are neither missing, unexpected nor misplaced.
    """
    depth = max((n for fqn in skeleton.live_names if (n := _layer(fqn)) is not None), default=-1)
    return {fqn for fqn in tensors if (n := _layer(fqn)) is not None and n > depth}


def _layer(fqn: str) -> int | None:
    match = re.search(r"\.(\d+)\.", fqn)
    return int(match.group(1)) if match else None


def _numberless(fqn: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", fqn)


def check_ties(
    tensors: Tensors,
    skeleton: Skeleton,
    config: Mapping[str, Any],
    checksums: Mapping[str, str] | None = None,
) -> Check:
    """Weights that the config ties are one tensor: the alias is absent, or equal to its owner.

    Args:
        tensors: all tensors.
        skeleton: the model of config.json.
        config: its content.
        checksums: of the bytes of each tensor, where these don't lie in a directory.
    """
    name = "tied weights"
    ties = dict(skeleton.tied) if skeleton.unavailable is None else _usual_tie(tensors, config)
    if not ties:
        return Check(name=name, status="passed", detail="the config ties nothing")
    twice, problems = [], []
    for alias, owner in ties.items():
        first, second = _resolve(owner, tensors), _resolve(alias, tensors)
        if first is None and second is None:
            problems.append(f"neither {owner} nor {alias} is there")
        elif first is not None and second is not None and first != second:
            twice.append(alias)
            if checksums is None:
                equal = _equal(tensors[first], tensors[second])
            else:
                a, b = tensors[first], tensors[second]
                equal = (a.dtype, a.shape, checksums[first]) == (b.dtype, b.shape, checksums[second])
            if not equal:
                problems.append(f"the config ties {second} to {first}, but they differ: loading would drop one of them")
    figures = {"ties": len(ties), "stored twice": len(twice)}
    if problems:
        return Check(name=name, status="failed", detail="; ".join(problems[:8]), figures=figures)
    detail = f"{listing(twice)}: stored though tied, and equal" if twice else "one copy of each tied weight"
    return Check(name=name, status="passed", detail=detail, figures=figures)


def _usual_tie(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, str]:
    heads = [fqn for fqn in tensors if fqn.endswith("lm_head.weight")]
    embeddings = [fqn for fqn in tensors if fqn.endswith(("embed_tokens.weight", "wte.weight"))]
    return {heads[0]: embeddings[0]} if declares_tied(config) and len(heads) == 1 == len(embeddings) else {}


def _resolve(live: str, tensors: Tensors) -> str | None:
    """The name in the files of a name in the module: transformers may put the parts before the last two differently."""
    if live in tensors:
        return live
    ending = ".".join(live.split(".")[-2:])
    found = [fqn for fqn in tensors if fqn == ending or fqn.endswith(f".{ending}")]
    return found[0] if len(found) == 1 else None


def _equal(first: StoredTensor, second: StoredTensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with open(first.file, "rb") as a, open(second.file, "rb") as b:
        a.seek(first.begin)
        b.seek(second.begin)
        left = first.nbytes
        while left:
            count = min(left, 4 << 20)
            if a.read(count) != b.read(count):
                return False
            left -= count
    return True


def check_dtypes(
    tensors: Tensors, config: Mapping[str, Any], record: Record | None, float32: Sequence[str] = ()
) -> Check:
    """config.json says the dtype that the weights have; others are there on purpose only.

    Args:
        tensors: all tensors.
        config: content of config.json.
        record: content of ckptflow.json; None where there is none.
        float32: ``Skeleton.float32``; tensors that it names and that were rounded are told.
    """
    name = "dtypes"
    sizes = bytes_by_dtype({k: t for k, t in tensors.items() if t.dtype.kind == "float" and t.dtype.itemsize > 1})
    figures = {f"{dtype} bytes": size for dtype, size in bytes_by_dtype(tensors).items()}
    said = next((config[key] for key in DTYPE_KEYS if isinstance(config.get(key), str)), None)
    if said is None or not sizes:
        return Check(name=name, status="skipped", detail="no dtype in config.json to compare with", figures=figures)
    said = said.removeprefix("torch.")
    asked = "source" if record is None else str(record.get("recipe", {}).get("dtype", "source"))
    main = next(iter(sizes)) if asked == "source" else asked
    if said != main:
        weights = "most of the weights are" if asked == "source" else "the conversion was to"
        detail = f"config.json says {said}, {weights} {main}"
        return Check(name=name, status="failed", detail=detail, figures=figures)
    other = [fqn for fqn, t in tensors.items() if t.dtype.name in sizes and t.dtype.name != main]
    listed = {} if record is None else record.get("tensors", {})
    as_source = record is not None and asked == "source"
    unexplained = [fqn for fqn in other if not as_source and not listed.get(fqn, {}).get("kept_reason")]
    if unexplained:
        detail = f"not {main}, and no reason is recorded: {listing(unexplained)}"
        status: Status = "warning" if record is None else "failed"
        return Check(name=name, status=status, detail=detail, figures=figures)
    kept = f"; kept as they were: {listing(other)}" if other else ""
    rounded = [fqn for fqn in tensors if _is_rounded(listed.get(fqn, {})) and _matches(fqn, float32)]
    told = f"; rounded, though transformers computes with them in float32: {listing(rounded)}" if rounded else ""
    cure = " (--keep-dtype keeps them)" if rounded else ""
    return Check(name=name, status="passed", detail=f"{main}, as config.json says{kept}{told}{cure}", figures=figures)


def _is_rounded(entry: Mapping[str, Any]) -> bool:
    return entry.get("source_dtype") in ("float32", "float64") and entry.get("dtype") in ("bfloat16", "float16")


def _matches(fqn: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(fqn, f"*{pattern}*") for pattern in patterns)
