"""Whether tokenizer and generation config go with the weights. Loaders tell late or never; a person should know now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptflow.errors import CheckpointError
from ckptflow.files.jsonfiles import read_json_object
from ckptflow.output.sidefiles import generation_notes
from ckptflow.validate.headers import StoredTensor
from ckptflow.validate.report import Check

EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "shared.weight")
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def check_tokenizer(out: Path, tensors: Mapping[str, StoredTensor]) -> Check:
    """Every token that the tokenizer can give has a row in the embedding."""
    name = "tokenizer"
    rows = [t.shape[0] for fqn, t in tensors.items() if fqn.endswith(EMBEDDINGS) and len(t.shape) == 2]
    if not rows or not (out / "tokenizer.json").is_file():
        return Check(name=name, status="skipped", detail="no tokenizer.json, or no token embedding to compare with")
    try:
        ids = list(_token_ids(read_json_object(out / "tokenizer.json", max_bytes=256 << 20)))
    except (CheckpointError, TypeError, ValueError, KeyError, AttributeError) as error:
        return Check(name=name, status="warning", detail=f"tokenizer.json does not parse: {error}")
    highest = max(ids, default=-1)
    figures = {"tokens": len(set(ids)), "highest id": highest, "embedding rows": max(rows)}
    if highest >= max(rows):
        detail = f"token id {highest} has no row in an embedding of {max(rows)} rows"
        return Check(name=name, status="warning", detail=detail, figures=figures)
    return Check(name=name, status="passed", detail="every token has a row in the embedding", figures=figures)


def _token_ids(tokenizer: Mapping[str, Any]) -> Iterator[int]:
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    # Unigram models list [piece, score] pairs and number them by place; the others map token → id.
    yield from range(len(vocabulary)) if isinstance(vocabulary, list) else (int(i) for i in vocabulary.values())
    yield from (int(token["id"]) for token in tokenizer.get("added_tokens", []))


def check_generation_config(out: Path, config: Mapping[str, Any]) -> Check:
    """generation_config.json is one that transformers would save again, with special tokens inside the vocabulary."""
    name = "generation config"
    if not (out / "generation_config.json").is_file():
        return Check(name=name, status="skipped", detail="no generation_config.json")
    try:
        content = read_json_object(out / "generation_config.json")
        notes = generation_notes(out)
    except CheckpointError as error:
        return Check(name=name, status="warning", detail=str(error))
    size = config.get("vocab_size")
    for key in SPECIAL_IDS:
        ids = content.get(key)
        for token in ids if isinstance(ids, list) else [ids]:
            if isinstance(token, int) and isinstance(size, int) and token >= size:
                notes.append(f"{key} {token} is outside the vocabulary of {size}")
    if notes:
        return Check(name=name, status="warning", detail="; ".join(notes))
    return Check(name=name, status="passed", detail="valid")
