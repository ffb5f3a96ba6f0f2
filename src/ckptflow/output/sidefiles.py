"""Config, tokenizer and processor files: carried over as the trainer left them, dtype in step with the weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptflow.errors import UnsafeFileError
from ckptflow.files.jsonfiles import read_json_object
from ckptflow.formats.files import stays_inside
from ckptflow.formats.side_files import check_whole_side_file, side_file_paths
from ckptflow.output.sentence_modules import MODULES
from ckptflow.plan import ConsolidationPlan
from ckptflow.transforms.quantized import quantized_module_of, quantized_modules

MAX_SIDE_FILE_BYTES = 256 * 1024 * 1024
DTYPE_KEYS = ("dtype", "torch_dtype")
QUANTIZATION_KEY = "quantization_config"


def side_files(directory: Path, root: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file to carry over, in name order.

    Args:
        directory: where config.json lies.
        root: links may not lead out of it.

    Raises:
        UnsafeFileError: a link leads out of ``root``, or a file is absurdly large.
        CheckpointError: another subclass: a file was not written to its end.
    """
    for path in side_file_paths(directory):
        if not stays_inside(path, root):
            raise UnsafeFileError(
                "a link leads out of the checkpoint", file=path, found=path.resolve(), fix="replace it by the file"
            )
        if path.stat().st_size > MAX_SIDE_FILE_BYTES:
            raise UnsafeFileError("not a config or tokenizer file at that size", file=path, found=path.stat().st_size)
        content = path.read_bytes()
        check_whole_side_file(path, content)
        yield str(path.relative_to(directory)), content


def read_config(directory: Path | None) -> dict[str, Any]:
    """config.json of a directory; empty where there is none."""
    if directory is None or not (directory / "config.json").is_file():
        return {}
    return read_json_object(directory / "config.json")


def main_dtype(plan: ConsolidationPlan) -> str | None:
    """The float dtype that holds most bytes outside quantized modules: what config.json has to say for ``source``."""
    quantized = quantized_modules(plan.tensors)
    sizes: Counter[str] = Counter()
    for tensor in plan.tensors:
        plain = tensor.dtype.kind == "float" and not tensor.dtype.name.startswith("float8")
        if plain and quantized_module_of(tensor.fqn, quantized) is None:
            sizes[tensor.dtype.name] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else None


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config with its dtype fields, nested ones too, saying ``dtype``."""

    def renew(key: str, value: Any) -> Any:
        if key in DTYPE_KEYS and isinstance(value, str):
            return dtype
        # A quantization config's own dtype fields describe how to compute, not what is stored.
        if key == QUANTIZATION_KEY or not isinstance(value, dict):
            return value
        return {k: renew(k, v) for k, v in value.items()}

    renewed = {k: renew(k, v) for k, v in config.items()}
    if not any(isinstance(config.get(k), str) for k in DTYPE_KEYS):
        renewed["dtype"] = dtype
    return renewed


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """config.json as transformers lays it out, in the order that the trainer left."""
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def generation_notes(directory: Path | None) -> list[str]:
    """What is wrong with generation_config.json; transformers refuses to save such a one, but loads it."""
    if directory is None or not (directory / "generation_config.json").is_file():
        return []
    config = read_json_object(directory / "generation_config.json")
    sampling = [k for k in ("temperature", "top_p", "top_k", "min_p", "typical_p") if config.get(k) is not None]
    if config.get("do_sample") is not True and sampling:
        return [
            f"generation_config.json sets {', '.join(sampling)} without do_sample; it is carried over as it is, and "
            "transformers refuses to save it again"
        ]
    return []


def loading_notes(side: Mapping[str, bytes]) -> list[str]:
    """What a person who loads the model should know of the files beside it; ``side`` is name → content."""
    if MODULES in side:
        return ["the modules of sentence-transformers are carried over as they are, in the dtype that they have"]
    if {"config.json", "adapter_config.json"} & set(side):
        return []
    return ["there is no config.json: transformers can't load this directory; --config DIR names one"]
