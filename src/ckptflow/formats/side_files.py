"""Config, tokenizer and processor files beside the weights: their names, and whether they were written to the end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from ckptflow.errors import CheckpointError, CorruptFileError, IncompleteCheckpointError
from ckptflow.formats.config_files import find_config_dir
from ckptflow.formats.peft_config import CONFIG_NAME as ADAPTER_CONFIG

# What transformers' from_pretrained classes look for; anything else in the directory belongs to the trainer.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tokenizer*.model",
    "tekken.json",
    "*.tiktoken",
    "sentencepiece.bpe.model",
    "spiece.model",
    "source.spm",
    "target.spm",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template*.json",
    "chat_template*.jinja",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
    "audio_tokenizer_config.json",
    "configuration_*.py",
    "modeling_*.py",
    "tokenization_*.py",
    "processing_*.py",
    "image_processing_*.py",
    "LICENSE*",
)
_MAY_BE_EMPTY = ("*.py", "*.jinja", "LICENSE*")
# Text and protocol buffers never end so; a page that a crash left unwritten does.
_UNWRITTEN = bytes(16)
# Tokenizers above that are parsed when they are carried over, not whenever somebody looks for checkpoints.
_SMALL_BYTES = 10**6


def side_file_paths(directory: Path) -> Iterator[Path]:
    """The files to carry over, in name order."""
    for path in sorted((*directory.glob("*"), *directory.glob("additional_chat_templates/*"))):
        name = str(path.relative_to(directory))
        if any(fnmatchcase(name, pattern) for pattern in SIDE_FILES) and path.is_file():
            yield path


def check_whole_side_file(path: Path, content: bytes) -> None:
    """A file that a crash cut off or left without its bytes goes into no model.

    Raises:
        IncompleteCheckpointError: it is empty, or ends in zeros.
        CorruptFileError: it should be JSON and is not.
    """
    _check_end(path, len(content), content[-len(_UNWRITTEN) :])
    if path.suffix == ".json":
        try:
            json.loads(content.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise CorruptFileError("not valid JSON", file=path, found=str(error), fix=_FIX) from error


_FIX = "save or copy it again, or move it away and name a directory with whole files with --config"


def damaged_side_file(path: Path, root: Path) -> CheckpointError | None:
    """Why config or tokenizer of a checkpoint at ``path`` can't be carried over; large ones are only looked at."""
    beside = path if path.is_dir() else path.parent
    directories = {find_config_dir(beside, root)}
    if (beside / ADAPTER_CONFIG).is_file():
        directories.add(beside)
    try:
        for file in (file for directory in directories if directory is not None for file in side_file_paths(directory)):
            with open(file, "rb") as stream:
                nbytes = os.fstat(stream.fileno()).st_size
                stream.seek(0 if nbytes <= _SMALL_BYTES else nbytes - len(_UNWRITTEN))
                content = stream.read()
            if nbytes <= _SMALL_BYTES:
                check_whole_side_file(file, content)
            else:
                _check_end(file, nbytes, content)
    except CheckpointError as error:
        return error
    except FileNotFoundError:
        return None  # it vanished: the weights tell whether the checkpoint did
    return None


def _check_end(path: Path, nbytes: int, end: bytes) -> None:
    if nbytes == 0 and not any(fnmatchcase(path.name, pattern) for pattern in _MAY_BE_EMPTY):
        raise IncompleteCheckpointError("a file of the checkpoint is empty", file=path, fix=_FIX)
    if end == _UNWRITTEN:
        raise IncompleteCheckpointError(
            "a file ends in zeros: its space was reserved and never written", file=path, fix=_FIX
        )
