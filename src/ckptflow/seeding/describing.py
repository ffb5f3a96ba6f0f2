"""The helper process behind ``describe``: asks transformers how it fills a new model, answers in JSON on stdout."""

from __future__ import annotations

import copy
import json
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptflow.seeding.fills import FreshTensor, Normal, TruncatedNormal
from ckptflow.seeding.recipes import FORMULAS, std_of
from ckptflow.validate.skeleton_process import MEMORY_LIMIT_BYTES, as_saved, model_class_for, ties_of


class RefusedError(Exception):
    """There is no answer; the message says why, for people."""


def main(arguments: Sequence[str]) -> int:
    """Read ``init_std`` and ``seed`` from stdin, print one line of JSON."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    question = json.load(sys.stdin)
    try:
        answer = describe(Path(arguments[0]), question["init_std"], question["seed"])
    except RefusedError as error:
        answer = {"refused": str(error)}
    print(json.dumps(answer))
    return 0


def describe(config_dir: Path, init_std: str | float, seed: int) -> dict[str, Any]:
    """The fields of ``FreshModel``.

    Raises:
        RefusedError: transformers does not know the model, or fills it by rules that can't be followed.
    """
    config, model_class, notes = _model_of(config_dir)
    hidden_size = _hidden_size(config)
    if init_std in FORMULAS and hidden_size is None:
        raise RefusedError(f"{init_std} needs the hidden size, and config.json names none")
    std = std_of(init_std, hidden_size or 0)
    if std is None:
        tensors, ties = _trace(config, model_class, seed)
    else:
        tensors, ties = _trace_with(config, model_class, seed, std)
    return {
        "architecture": model_class.__name__,
        "std": std,
        "tensors": [tensor.to_json() for tensor in tensors],
        "ties": ties,
        "notes": notes,
    }


def _model_of(config_dir: Path) -> tuple[Any, Any, list[str]]:
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise RefusedError(f"{error.name} is not installed; pip install 'ckptflow[verify]'") from error
    raw = json.loads((config_dir / "config.json").read_text())
    if raw.get("model_type") not in transformers.CONFIG_MAPPING:
        why = "needs remote code, which is never run" if "auto_map" in raw else "is not known to this transformers"
        raise RefusedError(f"model_type {raw.get('model_type')!r} {why}")
    try:
        config = transformers.AutoConfig.from_pretrained(config_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a config makes transformers raise is the answer
        raise RefusedError(f"transformers {transformers.__version__} refuses config.json: {error}") from error
    # Fresh weights are not quantized; the scales that such a config speaks of would be missing.
    config.__dict__.pop("quantization_config", None)
    model_class, notes = model_class_for(config)
    if isinstance(model_class, str):
        raise RefusedError(model_class)
    return config, model_class, notes


def _hidden_size(config: Any) -> int | None:
    try:
        text = config.get_text_config()
    except ValueError:  # several of them
        return None
    size = getattr(text, "hidden_size", None)
    return size if isinstance(size, int) and size > 0 else None


def _trace_with(config: Any, model_class: Any, seed: int, std: float) -> tuple[list[FreshTensor], dict[str, str]]:
    """As the model's own rule, but each draw that its ``initializer_range`` governs has this standard deviation.

    Which ones these are is seen by doubling it. A model's own scaling of residual outputs falls away: the formulas of
    the recipes have none.
    """
    if not _set_range(config, std):
        raise RefusedError("this model has no initializer_range; use --init-std default")
    once, ties = _trace(config, model_class, seed)
    _set_range(config, 2 * std)
    twice, _ = _trace(config, model_class, seed)
    return [_governed(a, b, std) for a, b in zip(once, twice, strict=True)], ties


def _governed(once: FreshTensor, twice: FreshTensor, std: float) -> FreshTensor:
    fills = []
    for a, b in zip(once.fills, twice.fills, strict=True):
        if isinstance(a.kind, Normal | TruncatedNormal) and isinstance(b.kind, Normal | TruncatedNormal):
            is_governed = abs(b.kind.std - 2 * a.kind.std) < 1e-6 * b.kind.std
            fills.append(replace(a, kind=replace(a.kind, std=std)) if is_governed else a)
        else:
            fills.append(a)
    return replace(once, fills=tuple(fills))


def _set_range(config: Any, std: float) -> bool:
    """Set ``initializer_range`` of a config and of those inside it; False where there is none."""
    import transformers

    inner = [value for value in vars(config).values() if isinstance(value, transformers.PreTrainedConfig)]
    found = [_set_range(each, std) for each in inner]
    if hasattr(config, "initializer_range"):
        config.initializer_range = std
        return True
    return any(found)


@contextmanager
def _uninitialised() -> Iterator[None]:
    """Models made inside leave initialising and tying to us: whether they do it themselves on the meta device depends
    on how transformers sees that device, and a tied head that is filled afterwards would undo the embedding's padding.
    """
    from transformers import PreTrainedModel

    base: Any = PreTrainedModel
    original = base.init_weights
    base.init_weights = lambda self: None
    try:
        yield
    finally:
        base.init_weights = original


def _trace(config: Any, model_class: Any, seed: int) -> tuple[list[FreshTensor], dict[str, str]]:
    """The tensors of a new model under their names in files, tied ones once; and alias → owner."""
    import torch

    from ckptflow.seeding.recording import recording

    torch.manual_seed(seed)  # some models compute values out of random numbers
    try:
        with recording() as recorder:
            with torch.device("meta"), _uninitialised():
                model = model_class(copy.deepcopy(config))
            model.initialize_weights()
            model.tie_weights()
            live = model.state_dict()
            ties = ties_of(model)
            names = {id(tensor): name for name, tensor in live.items()}
            saved = as_saved(model, {name: tensor for name, tensor in live.items() if name not in ties})
    except Exception as error:  # whatever a config makes transformers raise is the answer
        raise RefusedError(f"{model_class.__name__} can't be built: {type(error).__name__}: {error}") from error
    recorder.refuse_copies(live.values())
    buffers = {name for name, _ in model.named_buffers()}
    tensors = []
    for fqn, tensor in saved.items():
        fills = recorder.fills_of(tensor)
        if isinstance(fills, str):
            raise RefusedError(f"how transformers fills {fqn} is not known: {fills}")
        tensors.append(
            FreshTensor(
                fqn=fqn,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                is_buffer=names.get(id(tensor)) in buffers,
                fills=fills,
            )
        )
    return tensors, ties
