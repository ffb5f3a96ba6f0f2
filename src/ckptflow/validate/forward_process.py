"""The process behind ``forward.check_forward``: loads a model directory, runs it, answers in JSON on stdout."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptflow.formats.safetensors_header import read_safetensors
from ckptflow.tensors import Shape
from ckptflow.validate.quantizer import unusable_quantizer
from ckptflow.validate.structure import VALUE_HEAD

TOKENS = 16


def main(arguments: Sequence[str]) -> int:
    """Print one line of JSON with status, detail and figures."""
    print(json.dumps(run(Path(arguments[0]))))
    return 0


def run(out: Path) -> dict[str, Any]:
    """Load, compare what was loaded with what was expected, run twice."""
    import torch
    import transformers

    from ckptflow.validate.skeleton_process import model_class_for

    config = json.loads((out / "config.json").read_text())
    if config.get("model_type") not in transformers.CONFIG_MAPPING:
        return _skipped(
            f"model_type {config.get('model_type')!r} is not known to this transformers without remote code"
        )
    parsed = transformers.AutoConfig.from_pretrained(out, local_files_only=True, trust_remote_code=False)
    unusable = unusable_quantizer(parsed)
    if unusable is not None:
        return _skipped(unusable)
    model_class, _ = model_class_for(parsed, _headers(out))
    if isinstance(model_class, str):
        return _skipped(model_class)
    started = time.perf_counter()
    model, info = model_class.from_pretrained(
        out, config=parsed, local_files_only=True, dtype="auto", use_safetensors=True, output_loading_info=True
    )
    loaded = time.perf_counter()
    figures = {"architecture": model_class.__name__, "load seconds": round(loaded - started, 3)}
    problems = loading_problems(info)
    if problems:
        return {"status": "failed", "detail": "; ".join(problems), "figures": figures}
    if model.main_input_name != "input_ids":
        return _skipped(
            f"the model takes {model.main_input_name}, not token ids; it loads without a complaint", figures
        )
    inputs = _inputs(model)
    with torch.inference_mode():
        first, second = _main_output(model(**inputs)), _main_output(model(**inputs))
    figures["forward seconds"] = round((time.perf_counter() - loaded) / 2, 3)
    figures["tokens"] = TOKENS
    finite = first[first.isfinite()].float()
    figures["largest logit"] = float(finite.abs().max()) if finite.numel() else 0.0
    figures["logits' standard deviation"] = float(finite.std()) if finite.numel() > 1 else 0.0
    if not bool(first.isfinite().all()):
        count = int((~first.isfinite()).sum())
        return {"status": "failed", "detail": f"{count} of {first.numel()} logits are NaN or Inf", "figures": figures}
    if not torch.equal(first, second):
        return {"status": "failed", "detail": "the same input gave two different outputs", "figures": figures}
    return {"status": "passed", "detail": "loads without a complaint, logits are finite and repeat", "figures": figures}


def _headers(out: Path) -> dict[str, tuple[str, Shape]]:
    files = [read_safetensors(path, out) for path in sorted(out.glob("*.safetensors"))]
    return {name: (source.dtype.name, source.shape) for file in files for name, source in file.tensors.items()}


def _skipped(detail: str, figures: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"status": "skipped", "detail": detail, "figures": figures or {}}


def loading_problems(info: dict[str, Any]) -> list[str]:
    """What ``from_pretrained`` had to make up or leave out; trl's value head is left out on purpose."""
    unexpected = [name for name in info["unexpected_keys"] if not name.startswith(VALUE_HEAD)]
    problems = []
    if info["missing_keys"]:
        problems.append(f"missing: {', '.join(sorted(info['missing_keys'])[:8])}")
    if unexpected:
        problems.append(f"unexpected: {', '.join(sorted(unexpected)[:8])}")
    if info["mismatched_keys"]:
        problems.append(f"wrong shape: {', '.join(sorted(str(entry[0]) for entry in info['mismatched_keys'])[:8])}")
    return [*problems, *map(str, info["error_msgs"])]


def _inputs(model: Any) -> dict[str, Any]:
    import torch

    vocabulary = model.config.get_text_config().vocab_size
    # Ids spread over the vocabulary; the same for every run.
    ids = (torch.arange(TOKENS) * 7919 + 11).remainder(vocabulary).unsqueeze(0)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        end = getattr(model.config.get_text_config(), "eos_token_id", None)
        if isinstance(end, int) and 0 <= end < vocabulary:
            ids[0, -1] = end  # BART's classifiers look at this token alone
        inputs["decoder_input_ids"] = ids
    return inputs


def _main_output(output: Any) -> Any:
    return output.logits if getattr(output, "logits", None) is not None else output[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
