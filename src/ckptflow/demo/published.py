"""Looks at what arrived at the destination: fetches published models and loads them as a user would."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptflow.errors import CkptflowError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

RECORD = "ckptflow.json"
SAMPLING_SEED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A model directory in the store, as listed there."""

    global_step: int
    uri: str
    sizes_bytes: Mapping[str, int]
    """File name relative to ``uri`` → size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Impression:
    """What a fetched model does. ``loss`` is in nats per token on the text that was held back."""

    sha256: str
    dtype: str
    loss: float
    sentence: str


def list_published(client: S3Client, bucket: str) -> list[PublishedModel]:
    """All models in the bucket: each directory that holds a ``ckptflow.json``, by global step."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    sizes = {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", [])}
    models = []
    for key in sizes:
        directory, _, name = key.rpartition("/")
        steps = re.findall(r"step-(\d+)", directory)
        if name != RECORD or not steps:
            continue
        inside = {
            other.removeprefix(directory + "/"): size
            for other, size in sizes.items()
            if other.startswith(directory + "/")
        }
        models.append(PublishedModel(global_step=int(steps[-1]), uri=f"s3://{bucket}/{directory}", sizes_bytes=inside))
    return sorted(models, key=lambda model: model.global_step)


def fetch(client: S3Client, model: PublishedModel, directory: Path) -> Path:
    """Downloads all files of the model into ``directory`` and returns it."""
    bucket, _, prefix = model.uri.removeprefix("s3://").partition("/")
    for name in model.sizes_bytes:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(bucket, f"{prefix}/{name}", str(path))
    return directory


def try_out(model_dir: Path, held_back_text: str, prompt: str) -> Impression:
    """Loads the model with ``transformers`` and lets it read the held-back text and continue the prompt.

    Raises:
        CkptflowError: there are no weight files.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    weight_files = sorted(model_dir.glob("*.safetensors"))
    if not weight_files:
        raise CkptflowError("the published model has no weights", file=model_dir, expected="*.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    model.train(False)
    tokens = torch.tensor(tokenizer.encode(held_back_text))
    window = model.config.max_position_embeddings
    windows = tokens[: len(tokens) // window * window].view(-1, window)
    question = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(SAMPLING_SEED)
    with torch.inference_mode():
        loss = model(input_ids=windows, labels=windows).loss
        answer = model.generate(**question, max_new_tokens=60, do_sample=True, temperature=0.7, top_k=20)
    digest = hashlib.sha256()
    for path in weight_files:
        digest.update(path.read_bytes())
    return Impression(
        sha256=digest.hexdigest(),
        dtype=str(model.dtype).removeprefix("torch."),
        loss=float(loss),
        sentence=_one_sentence(str(tokenizer.decode(answer[0], skip_special_tokens=True))),
    )


def _one_sentence(text: str) -> str:
    """The first sentence of at least 60 characters, on one line; all of the text where none ends."""
    line = " ".join(text.split())
    ended = re.match(r'.{60,}?[.!?]["\']?(?=\s|$)', line)
    return ended.group() if ended else line + " …"
